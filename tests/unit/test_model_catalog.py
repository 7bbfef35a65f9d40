"""Which models a folder holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrun.client.model_catalog import find_models, spellings
from hetrun.errors import UserError


def write(path: Path, nbytes: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * nbytes)
    return path


def test_a_folder_of_all_kinds(tmp_path: Path) -> None:
    write(tmp_path / "One.Q4_0.gguf", 5)
    write(tmp_path / "mmproj-One.gguf")
    write(tmp_path / "notes.txt")
    write(tmp_path / "deep" / "two.GGUF")
    write(tmp_path / "deep" / "deeper" / "unseen.gguf")
    for part in (1, 2, 3):
        write(tmp_path / "split" / f"three-0000{part}-of-00003.gguf", part)
    write(tmp_path / "Four-0.5B" / "config.json")
    write(tmp_path / "Four-0.5B" / "model.safetensors", 11)
    write(tmp_path / "Four-0.5B" / "tokenizer.json")
    found = find_models([str(tmp_path)])
    assert {name: f.nbytes for name, f in found.items()} == {
        "Four-0.5B": 11,
        "One.Q4_0": 5,
        "three": 6,
        "two": 3,
    }
    assert found["three"].path.name == "three-00001-of-00003.gguf"


def test_files_and_folders_in_one_list(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.gguf"), write(tmp_path / "more" / "b.gguf")
    assert list(find_models([str(b), str(a), str(a)])) == ["a", "b"]


def test_what_cannot_be_offered(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        find_models([str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match="does not contain a model"):
        find_models([str(tmp_path)])
    with pytest.raises(UserError, match="does not contain a model"):
        find_models([str(write(tmp_path / "notes.txt"))])
    write(tmp_path / "a.gguf"), write(tmp_path / "x" / "a.gguf")
    with pytest.raises(UserError, match="have the same name"):
        find_models([str(tmp_path)])


def test_names_with_and_without_tags_and_endings() -> None:
    assert list(dict.fromkeys(spellings("tiny:latest"))) == ["tiny:latest", "tiny"]
    assert "tiny" in set(spellings("tiny.gguf:latest"))
    assert {"ollama:tiny", "ollama:tiny:latest"} <= set(spellings("ollama:tiny"))
    assert "other" not in set(spellings("tiny"))
