"""Models split into several GGUF files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from hetrun import LLM
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import ModelFileError
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.open_model import open_model
from hetrun.loader.tensor_list import parameters
from hetrun.loader.weight_reader import FileReader
from tests.hostile.trees import Table, parse_gguf, write_gguf
from tests.models.cases import GQA
from tests.support.rig import model_file

TENSORS = {f"blk.{i}.w": np.arange(32 * (i + 1), dtype=np.float32).reshape(i + 1, 32) for i in range(5)}


def write_split(folder: Path, name: str = "m", per_part: int = 2, small_first: bool = False) -> list[Path]:
    """A split model as the gguf package writes it."""
    writer = gguf.GGUFWriter(
        folder / f"{name}.gguf", "llama", split_max_tensors=per_part, small_first_shard=small_first
    )
    writer.add_name(name)
    for tensor, values in TENSORS.items():
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob(f"{name}-*.gguf"))


def split_llama(folder: Path) -> list[Path]:
    """The tiny llama in three parts, written by hand from the whole file."""
    reader, parts = gguf.GGUFReader(model_file(GQA)), []
    cuts = np.array_split(np.arange(len(reader.tensors)), 3)
    for i, cut in enumerate(cuts):
        parts.append(folder / f"tiny-{i + 1:05}-of-00003.gguf")
        writer = gguf.GGUFWriter(parts[-1], "llama")
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for field in reader.fields.values() if i == 0 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                kind, *sub = field.types
                writer.add_key_value(field.name, field.contents(), kind, *sub[-1:])
        for j in cut:
            tensor = reader.tensors[j]
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


@pytest.mark.parametrize("small_first", [False, True])
@pytest.mark.parametrize("opened", [0, 1, -1])
def test_any_part_opens_all(tmp_path: Path, small_first: bool, opened: int) -> None:
    paths = write_split(tmp_path, small_first=small_first)
    assert len(paths) == (4 if small_first else 3)
    file = read_gguf(paths[opened])
    assert (file.path, file.paths) == (str(paths[0]), tuple(map(str, paths)))
    assert file.get_str("general.name", "") == "m"
    assert file.size == sum(p.stat().st_size for p in paths)
    model, reader = open_model(paths[opened]), FileReader()
    assert parameters(model) == sum(v.size for v in TENSORS.values())
    for name, values in TENSORS.items():
        weight = model.find(name)
        assert weight is not None
        out = np.empty(weight.nbytes, np.uint8)
        reader.read(weight, out)
        assert (out.view(np.float32).reshape(weight.shape) == values).all()
    reader.close()


def test_a_split_model_answers_as_the_whole_one(tmp_path: Path) -> None:
    """llama.cpp reads the vocabulary from the first part, and wants to see the others beside it."""
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM(model_file(GQA), backends=["llamacpp"]) as whole:
        expected = whole.generate("The thing is", params)[0]
    with LLM(split_llama(tmp_path)[1], backends=["llamacpp"]) as split:
        found = split.generate("The thing is", params)[0]
        assert split.info.path.endswith("tiny-00001-of-00003.gguf")
    assert (found.tokens, found.text) == (expected.tokens, expected.text)


def test_one_part_is_a_whole_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "any name.gguf", "llama")
    writer.add_uint16("split.no", 0)
    writer.add_uint16("split.count", 1)
    writer.add_tensor("w", TENSORS["blk.0.w"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert list(read_gguf(tmp_path / "any name.gguf").tensors) == ["w"]


def more_tensors(paths: list[Path]) -> None:
    TENSORS["more"] = np.zeros((1, 32), np.float32)
    try:
        shutil.copy(write_split(paths[0].parent, "other", per_part=2)[1], paths[1])
    finally:
        del TENSORS["more"]


def patched(paths: list[Path], key: bytes, value: int) -> None:
    """Change a number behind its key."""
    for path in paths:
        raw = bytearray(path.read_bytes())
        raw[raw.index(key) + len(key) + 4] = value
        path.write_bytes(raw)


def lists(paths: list[Path], key: str) -> None:
    """Say several numbers where one belongs."""
    for path in paths:
        tree = parse_gguf(path.read_bytes())
        pairs = tree.get("pairs").set(key, Table((("value", (1, 2, 3)),)))
        path.write_bytes(write_gguf(tree.set("pairs", pairs)))


BROKEN: dict[str, tuple[Callable[[list[Path]], object], str]] = {
    "one is missing": (lambda p: p[1].unlink(), "one of 3 parts, but 'm-00002-of-00003.gguf' is missing"),
    "two are missing": (
        lambda p: list(map(os.remove, p[1:])),
        "but 2 parts are, 'm-00002-of-00003.gguf' first, missing: download the rest",
    ),
    "renamed": (
        lambda p: p[0].rename(p[0].with_name("model.gguf")),
        "is part 1 of 3 of a split model, so its name must end in -00001-of-00003.gguf",
    ),
    "of another split": (lambda p: shutil.copy(p[2], p[1]), "is part 3 of 3, but its name says 2"),
    "wrong number": (lambda p: patched(p[:1], b"split.no", 9), "'split.no' must be between 0 and 2, it is 9"),
    "wrong count": (lambda p: patched(p[1:2], b"split.count", 2), "is part 2 of 2, but its name says 2"),
    "another model's": (
        more_tensors,
        "belongs to another model than m-00001-of-00003.gguf: their split.tens",
    ),
    "of several counts": (
        lambda p: lists(p[1:2], "split.tensors.count"),
        "m-00002-of-00003.gguf: metadata key 'split.tensors.count' must be a whole number, it is an array",
    ),
    "of several names": (lambda p: lists(p[:2], "general.name"), "'general.name' must be a string"),
    "too few tensors": (
        lambda p: patched(p, b"split.tensors.count", 9),
        "its 3 parts have 5 tensors, but it says 9: they are of two models",
    ),
    "the same tensor twice": (
        lambda p: p[1].write_bytes(p[1].read_bytes().replace(b"blk.2.w", b"blk.0.w")),
        "the tensor 'blk.0.w' is also in m-00001-of-00003.gguf",
    ),
    "truncated": (
        lambda p: p[2].write_bytes(p[2].read_bytes()[:-8]),
        "m-00003-of-00003.gguf: the file is",
    ),
    "not GGUF": (lambda p: p[1].write_bytes(b"<html>"), "00002-of-00003.gguf: is not a GGUF file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_set_is_refused_with_a_sentence(tmp_path: Path, name: str) -> None:
    harm, message = BROKEN[name]
    paths = write_split(tmp_path)
    harm(paths)
    first = paths[0] if paths[0].exists() else tmp_path / "model.gguf"
    with pytest.raises(ModelFileError) as caught:
        read_gguf(first)
    assert message in str(caught.value)
