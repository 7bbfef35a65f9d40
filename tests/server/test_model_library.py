"""What the server says of models without loading them, and what it may download and delete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetrun.errors import UserError
from hetrun.loader.hub.stores import own_folder
from hetrun.server.library import NotHere, NotOurs
from hetrun.tools.model_library import LocalLibrary
from tests.loader.hub_stand_in import Hub, Repository, running
from tests.models.tiny import TinyLlama, write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(TinyLlama("tiny", layers=1), tmp_path_factory.mktemp("m") / "tiny-F32.gguf")


def test_facts_of_a_file(tiny: Path) -> None:
    facts = LocalLibrary().facts(tiny)
    assert (facts.architecture, facts.format, facts.quantization, facts.embeds) == (
        "llama",
        "gguf",
        "F32",
        False,
    )
    assert facts.metadata["general.architecture"] == "llama"
    assert facts.metadata["llama.block_count"] == 1
    assert facts.metadata["tokenizer.ggml.tokens"] == []  # long lists are not shown
    assert facts.parameters > 1000
    assert facts.context == facts.metadata["llama.context_length"]
    assert not facts.fills
    json.dumps(facts.metadata, allow_nan=False)
    assert LocalLibrary(ctx=7).facts(tiny).context == 7
    with pytest.raises(UserError):
        LocalLibrary().facts(tiny.with_name("other.gguf"))


def test_names_on_the_hub() -> None:
    known = LocalLibrary().known
    assert known("hf.co/user/repo:Q4_K_M") == known("hf:user/repo:Q4_K_M") == "hf:user/repo:Q4_K_M"
    assert known("https://huggingface.co/user/repo:latest") == "hf:user/repo"
    for name in ("tiny", "tiny:latest", "user/repo", "hf:wrong"):
        assert known(name) == name


def test_what_cannot_be_downloaded(home: Path, tiny: Path) -> None:
    library = LocalLibrary()
    for name in ("llama3.2", "llama3.2:latest", "../../etc/passwd", "hf:a", "http://example.com/a/b"):
        with pytest.raises(UserError, match="from Hugging Face's hub only"):
            library.check_pull(name)
    with pytest.raises(UserError, match="forbids downloading"):
        LocalLibrary(offline=True).check_pull("hf:user/repo")
    own_folder().mkdir(parents=True)
    os.link(tiny, own_folder() / "here.gguf")
    library.check_pull("here")  # it is
    assert library.pull("here", lambda done, total, what: None).path == own_folder() / "here.gguf"


def test_only_models_of_hetrun_are_deleted(home: Path, tiny: Path) -> None:
    library = LocalLibrary()
    own_folder().mkdir(parents=True)
    os.link(tiny, own_folder() / "here.gguf")
    theirs = home / ".lmstudio" / "models" / "a" / "b"
    theirs.mkdir(parents=True)
    os.link(tiny, theirs / "theirs.gguf")
    for name in ("nowhere", "hf:user/repo", "../here", str(tiny)):
        with pytest.raises(NotHere):
            library.removal(name)
    with pytest.raises(NotOurs):
        library.removal("lmstudio:a/b/theirs")
    what = library.removal("here")
    assert what.paths == (own_folder() / "here.gguf",)
    library.remove(what)
    assert not (own_folder() / "here.gguf").exists()
    assert (theirs / "theirs.gguf").exists()


@pytest.fixture
def hub(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running() as found:
        found.repositories["a/tiny"] = Repository({"tiny-F32.gguf": tiny.read_bytes()})
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield found


PULLS = """
from hetrun.tools.model_library import LocalLibrary

library, told = LocalLibrary(), []
found = library.pull("hf.co/a/tiny", lambda *step: told.append(step))
assert library.facts(found.path).architecture == "llama"
print(found.name, found.path.name)
library.remove(library.removal("hf:a/tiny"))
assert not found.path.exists()
"""


@pytest.mark.slow
def test_a_download_and_its_removal(hub: Hub) -> None:
    # In a process of its own: the hub's library reads its settings when it is imported.
    done = subprocess.run([sys.executable, "-c", PULLS], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("hf:a/tiny tiny-F32.gguf\n", 0), done.stderr
