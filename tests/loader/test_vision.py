"""What the header of a vision tower says, and what is said of one that is of no use."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from hetrun.errors import ModelFileError
from hetrun.loader.vision import read_vision, why_not
from tests.support import towers

KNOWN = {
    "qwen3vl": ("qwen3vl_merger", 3 * towers.WIDTH, 2, True, False),
    "qwen3vl-flat": ("qwen3vl_merger", towers.WIDTH, 0, True, False),
    "qwen35": ("qwen3vl_merger", towers.WIDTH, 0, True, False),
    "gemma3": ("gemma3", towers.WIDTH, 0, False, True),
    "gemma4": ("gemma4v", towers.WIDTH, 0, False, True),
    "gemma4-unified": ("gemma4uv", towers.WIDTH, 0, False, True),
    "mistral3": ("pixtral", towers.WIDTH, 0, False, False),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("towers")
    return {family: towers.write_tower(family, folder / f"{family}.gguf") for family in KNOWN}


@pytest.mark.parametrize("family", KNOWN)
def test_what_a_header_says(made: Mapping[str, Path], family: str) -> None:
    found = read_vision(made[family])
    assert (found.family, found.width, found.deepstack, found.spatial, found.whole) == KNOWN[family]
    assert 0 < made[family].stat().st_size - found.nbytes < 20_000
    layers = (0, 0) if family == towers.UNIFIED else (96, 3)
    assert (found.tower.width, found.tower.ffn, found.tower.layers) == (64, *layers)
    assert found.tower.grain == towers.PATCH * (3 if family.startswith("gemma4") else 2)
    most = {"gemma3": 16, "gemma4": 1120, "gemma4-unified": 1120, "mistral3": 1024}
    assert found.tower.most_rows == most.get(family, 4096)


@pytest.mark.parametrize(("width", "whole"), [(1536, False), (2560, False), (2816, True)])
def test_the_small_gemmas_see_pictures_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, whole: bool
) -> None:
    monkeypatch.setattr(towers, "WIDTH", width)
    assert read_vision(towers.write_tower("gemma4", tmp_path / "t.gguf")).whole is whole


WRONG: Mapping[str, tuple[dict[str, object], str]] = {
    "sound": (
        {"has_vision_encoder": False, "has_audio_encoder": True},
        "it encodes sound, and no pictures: get the mmproj file of a model that reads pictures",
    ),
    "nothing": ({"has_vision_encoder": False}, "it has no vision encoder"),
    "a number for a flag": ({"has_vision_encoder": 1}, "must be true or false"),
    "another projector": (
        {"projector_type": "ldpv3"},
        "its projector is 'ldpv3', which hetrun does not know",
    ),
    "a number for a name": ({"projector_type": 7}, "'clip.projector_type' must be a string"),
    "no layers": ({"vision__block_count": 0}, "'clip.vision.block_count' must be between 1 and 1024"),
    "many layers": ({"vision__block_count": 1 << 31}, "'clip.vision.block_count' must be between 1 and 1024"),
    "no heads": ({"vision__attention__head_count": 0}, "head_count' must be between 1 and 1024"),
    "odd heads": ({"vision__attention__head_count": 7}, "its 64 columns are not 7 heads of equal size"),
    "wide": ({"vision__embedding_length": 1 << 30}, "embedding_length' must be between 1 and 65536"),
    "no patch": ({"vision__patch_size": 0}, "patch_size' must be between 1 and 64"),
    "a text for a patch": ({"vision__patch_size": "4"}, "patch_size' must be a whole number"),
    "a half patch": ({"vision__patch_size": 0.5}, "patch_size' must be a whole number"),
    "large": ({"vision__image_size": 1 << 20}, "image_size' must be between 0 and 8192"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_with_a_header(tmp_path: Path, kind: str) -> None:
    said, sentence = WRONG[kind]
    path = towers.write_tower("qwen3vl-flat", tmp_path / "t.gguf", 2, **said)
    with pytest.raises(ModelFileError) as caught:
        read_vision(path)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(("size", "patch"), [(30, 4), (0, 4)])
def test_pictures_of_one_size_must_be_whole_rows(tmp_path: Path, size: int, patch: int) -> None:
    path = towers.write_tower("gemma3", tmp_path / "t.gguf", vision__image_size=size)
    with pytest.raises(ModelFileError, match=f"pictures of {size} pixels are not whole rows of 8 pixels"):
        read_vision(path)


def test_the_row_that_ends_lines_must_be_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def halves() -> towers.Tensors:
        for name, weight in towers.pixtral_tower():
            yield name, replace(weight, half=True) if name == "v.token_embd.img_break" else weight

    kind, _, more = towers.TOWERS["mistral3"]
    monkeypatch.setitem(towers.TOWERS, "mistral3", (kind, halves, more))
    path = towers.write_tower("mistral3", tmp_path / "t.gguf")
    with pytest.raises(ModelFileError, match=r"img_break' is not there as 64 float32 numbers"):
        read_vision(path)


def test_a_promise_of_more_patches_than_places(tmp_path: Path) -> None:
    """A picture would take terabytes."""
    path = towers.write_tower("gemma3", tmp_path / "t.gguf", vision__image_size=8192)
    with pytest.raises(ModelFileError, match="it must have 4194304 rows"):
        read_vision(path)


def without(name: str) -> Callable[[], towers.Tensors]:
    def tensors() -> towers.Tensors:
        return ((n, w) for n, w in towers.gemma4_tower() if n != name)

    return tensors


@pytest.mark.parametrize("missing", ["mm.input_projection.weight", "v.position_embd.weight"])
def test_tensors_that_rows_are_counted_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    kind, _, more = towers.TOWERS["gemma4"]
    monkeypatch.setitem(towers.TOWERS, "gemma4", (kind, without(missing), more))
    path = towers.write_tower("gemma4", tmp_path / "t.gguf")
    with pytest.raises(ModelFileError, match=f"tensor '{missing}' is missing"):
        read_vision(path)


def test_a_table_of_places_that_large_pictures_would_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short() -> towers.Tensors:
        for name, weight in towers.gemma4_tower():
            small = towers.Weight((2, 100, towers.SEEN_WIDTH), 0.3)
            yield name, small if name == "v.position_embd.weight" else weight

    kind, _, more = towers.TOWERS["gemma4"]
    monkeypatch.setitem(towers.TOWERS, "gemma4", (kind, short, more))
    path = towers.write_tower("gemma4", tmp_path / "t.gguf")
    with pytest.raises(ModelFileError, match="must have 2 tables of 3360 rows or more"):
        read_vision(path)


def test_a_model_is_no_tower(tmp_path: Path) -> None:
    path = towers.write_text("gemma3", tmp_path / "t.gguf")
    with pytest.raises(ModelFileError, match=r"it is no vision tower \(mmproj\), but a model of 'gemma3'"):
        read_vision(path)


def test_a_promise_of_more_than_the_file_has(tmp_path: Path) -> None:
    """Sizes are held against the file before anything is taken for them."""
    writer = GGUFWriter(tmp_path / "t.gguf", "clip")
    writer.add_tensor("mm.2.bias", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    raw = (tmp_path / "t.gguf").read_bytes()
    at = raw.index(b"mm.2.bias") + len("mm.2.bias") + 4
    (tmp_path / "t.gguf").write_bytes(raw[:at] + (1 << 40).to_bytes(8, "little") + raw[at + 8 :])
    with pytest.raises(ModelFileError, match="it is truncated, download it again"):
        read_vision(tmp_path / "t.gguf")


def test_damaged_headers_are_a_sentence_or_a_tower(made: Mapping[str, Path], tmp_path: Path) -> None:
    raw = made["qwen3vl"].read_bytes()
    header, chance = raw[:6000], random.Random(1)
    path, said = tmp_path / "t.gguf", list[str]()
    for _ in range(150):
        cut = chance.randrange(1, len(header)) if chance.random() < 0.3 else len(raw)
        damaged = bytearray(raw[:cut])
        for _ in range(chance.randrange(4)):
            damaged[chance.randrange(min(cut, len(header)))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            assert read_vision(path).width > 0
        except ModelFileError as error:
            said.append(str(error))
    assert len(said) > 60
    assert not any("\n" in sentence for sentence in said)


def test_which_tower_belongs_to_which_model(made: Mapping[str, Path]) -> None:
    deep, flat, gemma = (read_vision(made[f]) for f in ("qwen3vl", "qwen3vl-flat", "gemma3"))
    assert why_not(deep, "qwen3vl", towers.WIDTH, 2) == ""
    assert why_not(flat, "qwen35", towers.WIDTH, 0) == ""
    assert why_not(gemma, "gemma3", towers.WIDTH, 0) == ""
    assert why_not(gemma, "qwen3vl", 64, 0) == ("its projector gemma3 belongs to gemma3, and not to qwen3vl")
    assert why_not(flat, "qwen3vl", 128, 0) == "its rows have 64 columns, and the model's 128"
    assert why_not(deep, "qwen3vl", 64, 0) == "it has 2 deepstack layers, and the model 0"
