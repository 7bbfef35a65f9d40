"""Where the vision tower of a model is found: beside it, in a repository of the hub, in Ollama's store."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from hetrun.errors import ModelFileError, OptionError
from hetrun.loader.hub.names import RepositoryModel
from hetrun.loader.hub.projectors import find_vision
from hetrun.loader.hub.remove import removal
from hetrun.loader.hub.select import RepositoryFile, choose, projectors, with_tower
from hetrun.loader.open_model import open_model
from hetrun.loader.vision import NoVision, Vision
from tests.models import tiny
from tests.support import towers
from tests.support.towers import Seeing

MODEL, PROJECTOR = "application/vnd.ollama.image.model", "application/vnd.ollama.image.projector"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Seeing]:
    folder = tmp_path_factory.mktemp("seeing")
    families = ("qwen3vl", "qwen35", "gemma3", "mistral3")
    return {family: towers.write_pair(family, folder / family) for family in families}


def placed(folder: Path, files: Mapping[str, Path]) -> Path:
    """Copies under other names; the first is the model."""
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / name)
    return folder / next(iter(files))


def seen(model: Path, asked: str | None = None) -> str:
    """The file that was found."""
    found = find_vision(open_model(model), asked)
    assert isinstance(found, Vision), found
    return Path(found.path).name


def reason(model: Path, asked: str | None = None) -> str:
    """Why there is none."""
    found = find_vision(open_model(model), asked)
    assert isinstance(found, NoVision), found
    return found.reason


NAMES = (
    "mmproj-F16.gguf",
    "mmproj-model-f16.gguf",
    "mmproj.gguf",
    "tiny.mmproj-Q8_0.gguf",
    "mmproj_F32.gguf",
)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_others_give(tmp_path: Path, pairs: Mapping[str, Seeing], name: str) -> None:
    pair = pairs["qwen35"]
    model = placed(tmp_path, {"m-Q4_K_M.gguf": pair.text, name: pair.mmproj})
    assert seen(model) == name
    assert seen(tmp_path) == name  # a folder with one model and its tower is that model


def test_of_several_the_headers_say_which_fits(tmp_path: Path, pairs: Mapping[str, Seeing]) -> None:
    files = {f"{f}.gguf": pair.text for f, pair in pairs.items()}
    files |= {f"mmproj-{i}.gguf": pair.mmproj for i, pair in enumerate(pairs.values())}
    placed(tmp_path, files)
    (tmp_path / "mmproj-0a.gguf").write_bytes(b"GGUF, but no more")
    (tmp_path / "mmproj-0b.gguf").mkdir()
    for i, family in enumerate(pairs):
        assert seen(tmp_path / f"{family}.gguf") == f"mmproj-{i}.gguf"


def test_of_several_that_fit_names_and_types_decide() -> None:
    def best(model: str, *names: str) -> str:
        return projectors([RepositoryFile(name) for name in names], model)[0].name

    assert best("m", "mmproj-F32.gguf", "mmproj-Q8_0.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf") == (
        "mmproj-F16.gguf"
    )
    assert best("m", "mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-Q8_0.gguf") == "mmproj-BF16.gguf"
    both = ("mmproj-Qwen3-VL-4B-F16.gguf", "mmproj-Qwen3-VL-8B-Q8_0.gguf", "mmproj-F16.gguf")
    assert best("Qwen3-VL-8B-Instruct-Q4_K_M", *both) == "mmproj-Qwen3-VL-8B-Q8_0.gguf"
    assert best("Qwen3-VL-4B-Instruct-Q4_K_M", *both) == "mmproj-Qwen3-VL-4B-F16.gguf"
    assert not projectors(
        [RepositoryFile("m.gguf"), RepositoryFile("mmproj.txt"), RepositoryFile("my-imatrix.gguf")], "m"
    )


def test_what_fits_nothing_is_named(tmp_path: Path, pairs: Mapping[str, Seeing]) -> None:
    model = placed(tmp_path, {"m.gguf": pairs["qwen3vl"].text})
    assert reason(model).startswith("there is no mmproj file beside the model: put the one of this model")
    placed(tmp_path, {"mmproj-a.gguf": pairs["qwen35"].mmproj})
    assert reason(model).endswith("mmproj-a.gguf: it has 0 deepstack layers, and the model 2")
    placed(tmp_path, {"mmproj-b.gguf": pairs["gemma3"].mmproj})
    assert reason(model).endswith("(and 1 more files)")
    assert reason(model, "none") == "--mmproj none: pictures are left out"


def test_a_file_that_is_asked_for_must_fit(tmp_path: Path, pairs: Mapping[str, Seeing]) -> None:
    model = placed(tmp_path / "m", {"m.gguf": pairs["gemma3"].text})
    assert seen(model, str(pairs["gemma3"].mmproj)) == pairs["gemma3"].mmproj.name
    source = open_model(model)
    with pytest.raises(OptionError, match="does not belong to tiny-gemma3: its projector pixtral belongs to"):
        find_vision(source, str(pairs["mistral3"].mmproj))
    with pytest.raises(OptionError, match="there is no such file"):
        find_vision(source, str(tmp_path / "gone.gguf"))
    with pytest.raises(ModelFileError, match="it is no vision tower"):
        find_vision(source, str(model))


def test_models_that_read_texts_are_asked_nothing(tmp_path: Path, pairs: Mapping[str, Seeing]) -> None:
    """Llama's architecture has models of all kinds: a tower beside one must at least be called like it."""
    model = tiny.write_gguf(tiny.TinyLlama("plain", layers=1, embd=64), tmp_path / "mini-pixtral-Q8_0.gguf")
    found = find_vision(open_model(model))
    assert found == NoVision("the model reads texts, and no pictures", usual=True)
    placed(tmp_path, {"mmproj-F16.gguf": pairs["mistral3"].mmproj})
    assert find_vision(open_model(model)) == found
    placed(tmp_path, {"mmproj-mini-pixtral-F16.gguf": pairs["mistral3"].mmproj})
    assert seen(model) == "mmproj-mini-pixtral-F16.gguf"


def test_a_tower_inside_the_models_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def both() -> towers.Tensors:
        yield from towers.gemma3_text()
        yield from towers.gemma3_tower()

    monkeypatch.setitem(towers.TEXTS, "gemma3", both)
    model = towers.write_text("gemma3", tmp_path / "m.gguf")
    assert reason(model).startswith("its vision tower is inside the model's own file")


# --- other programs' stores


def test_a_repository_of_the_hub(tmp_path: Path, pairs: Mapping[str, Seeing]) -> None:
    """Also from a folder in it, and never from above it."""
    pair, hub = pairs["qwen35"], tmp_path / "models--a--b"
    shot = hub / "snapshots" / ("c" * 40)
    model = placed(shot, {"Q4/m-Q4_K_M.gguf": pair.text})
    placed(hub / "snapshots", {"mmproj-F16.gguf": pair.mmproj})
    assert "there is no mmproj file" in reason(model)
    placed(shot, {"mmproj-F16.gguf": pair.mmproj})
    assert seen(model) == "mmproj-F16.gguf"
    placed(shot, {"Q4/mmproj-Q8_0.gguf": pair.mmproj})
    assert seen(model) == "mmproj-Q8_0.gguf"


def blob(root: Path, path: Path) -> str:
    """A file in Ollama's store, and its digest."""
    data = path.read_bytes()
    name = hashlib.sha256(data).hexdigest()
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    (root / "blobs" / f"sha256-{name}").write_bytes(data)
    return f"sha256:{name}"


def manifest(root: Path, name: str, layers: object) -> None:
    path = root / "manifests" / "registry.ollama.ai" / "library" / name / "latest"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"layers": layers}))


def test_ollamas_projector(tmp_path: Path, pairs: Mapping[str, Seeing]) -> None:
    pair, other = pairs["gemma3"], pairs["qwen35"]
    digest, tower, stray = (blob(tmp_path, path) for path in (pair.text, pair.mmproj, other.mmproj))
    model = tmp_path / "blobs" / digest.replace(":", "-")
    manifest(tmp_path, "a", [{"mediaType": MODEL, "digest": "sha256:" + "0" * 64}, {"mediaType": 7}, None])
    manifest(tmp_path, "b", [{"mediaType": MODEL, "digest": digest}])
    assert "there is no mmproj file" in reason(model)
    manifest(
        tmp_path, "c", [{"mediaType": MODEL, "digest": digest}, {"mediaType": PROJECTOR, "digest": tower}]
    )
    assert seen(model) == tower.replace(":", "-")
    shutil.rmtree(tmp_path / "manifests")
    layers = [{"mediaType": MODEL, "digest": digest}, {"mediaType": PROJECTOR, "digest": stray}]
    manifest(tmp_path, "d", layers)
    assert "qwen35moe, and not to gemma3" in reason(model)
    shutil.rmtree(tmp_path / "manifests")
    for number, wrong in enumerate(("sha256:../../etc/passwd", 5, None, "sha256:" + "1" * 64)):
        manifest(tmp_path, f"e{number}", [layers[0], {"mediaType": PROJECTOR, "digest": wrong}])
    assert "there is no mmproj file" in reason(model)


# --- what is downloaded


def names_of(wanted: str, *files: str) -> list[str]:
    repository = [RepositoryFile(name, 1 << 20) for name in files]
    chosen = with_tower(choose(repository, RepositoryModel("a/b", wanted)), repository)
    assert chosen.size == len(chosen.all_files) << 20
    return [file.name for file in chosen.all_files]


def test_a_repositorys_tower_comes_with_its_model() -> None:
    two = ("m-Q4_K_M.gguf", "m-Q8_0.gguf")
    assert names_of("", *two, "mmproj-F32.gguf", "mmproj-F16.gguf") == ["m-Q4_K_M.gguf", "mmproj-F16.gguf"]
    assert names_of("Q8_0", *two, "mmproj-BF16.gguf") == ["m-Q8_0.gguf", "mmproj-BF16.gguf"]
    assert names_of("", *two) == ["m-Q4_K_M.gguf"]
    folders = ("4B/m-4B-Q4_0.gguf", "8B/m-8B-Q8_0.gguf", "8B/mmproj-8B-F16.gguf", "mmproj-m-4B-F16.gguf")
    assert names_of("m-8B", *folders) == ["8B/m-8B-Q8_0.gguf", "8B/mmproj-8B-F16.gguf"]
    assert names_of("m-4B", *folders) == ["4B/m-4B-Q4_0.gguf", "mmproj-m-4B-F16.gguf"]
    parts = ("m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf")
    assert names_of("", *parts, "mmproj-F16.gguf") == [*parts, "mmproj-F16.gguf"]


def test_the_last_model_of_a_repository_takes_its_tower_along(home: Path) -> None:
    repo = home / "cache" / "huggingface" / "hub" / "models--a--b"
    shot = repo / "snapshots" / ("c" * 40)
    shot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c" * 40)
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf"):
        (shot / name).write_bytes(b"x")
    assert repo not in removal("hf:a/b:Q4_0").paths
    os.unlink(shot / "m-Q8_0.gguf")
    assert removal("hf:a/b:Q4_0").paths == (repo,)
