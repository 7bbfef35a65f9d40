"""The models in a list of files and folders, found without opening them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Protocol

from hetrun.errors import UserError

GGUF = ".gguf"
# Later parts of a split model belong to the first part, and image projectors to another model.
NO_MODEL = re.compile(r"(?!.*-00001-of-\d{5}\.gguf$).*-\d{5}-of-\d{5}\.gguf$|mmproj", re.IGNORECASE)
FIRST_PART = re.compile(r"-00001-of-\d{5}$")
MOST_MODELS = 1000
LATEST = ":latest"  # the tag that Ollama's clients mean if a name has none


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model that may be loaded."""

    name: str  # its name in requests
    path: Path
    nbytes: int


class ModelCatalog(Protocol):
    """The models that may be offered, which come and go while a server runs."""

    def scan(self) -> Mapping[str, CatalogModel]:
        """All of them by name; looks at folders, and opens no model."""
        ...

    def named(self, name: str) -> str | None:
        """The name, among those of the last scan, of the model that may also be called so."""
        ...


def find_models(places: Iterable[str]) -> Mapping[str, CatalogModel]:
    """Models by name, in alphabetical order. A folder with a model is that model; any other folder is
    searched, with the folders in it. Raises UserError if nothing is found, or two have the same name."""
    found: dict[str, CatalogModel] = {}
    for place in places:
        path = Path(place).expanduser()
        if not os.path.exists(path):
            raise UserError(f"--models {place} does not exist; give model files, or folders of them")
        paths = [path] if _is_model(path) else _within(path) if path.is_dir() else []
        if not paths:
            raise UserError(
                f"--models {place} does not contain a model: no .gguf file, no folder with safetensors"
            )
        for model in paths:
            name = name_of(model)
            if name in found and not os.path.samefile(found[name].path, model):
                raise UserError(
                    f"--models: {found[name].path} and {model} have the same name; rename one of them"
                )
            found[name] = CatalogModel(name, model, _size(model))
    if len(found) > MOST_MODELS:
        raise UserError(f"--models: {len(found)} models are more than the {MOST_MODELS} that can be offered")
    return dict(sorted(found.items()))


def name_of(path: PurePath) -> str:
    """The name of the model at this path."""
    name = path.name
    return FIRST_PART.sub("", name[: -len(GGUF)]) if name.lower().endswith(GGUF) else name


def spellings(name: str) -> Iterator[str]:
    """The names of models that a request may mean by this name, the closest first: a file may be named with
    its ending, and Ollama's clients add a tag or leave it out."""
    bare = name.removesuffix(LATEST)
    for spelling in (name, bare):
        yield spelling
        yield name_of(PurePath(spelling))
    yield f"{bare}{LATEST}"


def identity(model: Path) -> str:
    """A fingerprint of the files' state; empty if they cannot be read."""
    digest = hashlib.sha256()
    try:
        for path in _files(model):
            status = path.stat()
            digest.update(f"{os.path.realpath(path)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    except (OSError, ValueError):
        return ""
    return digest.hexdigest()


def _files(model: Path) -> list[Path]:
    """All files that a model is read from."""
    if model.is_dir():
        return sorted(p for p in model.iterdir() if p.suffix in (".safetensors", ".json", ".jinja"))
    if FIRST_PART.search(model.name[: -len(GGUF)]):
        return sorted(_parts(model))
    return [model]


def _parts(first: Path) -> Iterable[Path]:
    stem = FIRST_PART.sub("", first.name[: -len(GGUF)])
    return first.parent.glob(f"{_literal(stem)}-?????-of-?????{GGUF}")


def _within(folder: Path) -> list[Path]:
    """The models in a folder and in its direct subfolders."""
    found: list[Path] = []
    for path in sorted(_entries(folder)):
        if _is_model(path):
            found.append(path)
        elif path.is_dir():
            found += [p for p in sorted(_entries(path)) if _is_model(p)]
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise UserError(f"--models: {folder} cannot be read: {error.strerror}") from None


def _is_model(path: Path) -> bool:
    if path.is_dir():
        return (path / "config.json").is_file() and any(path.glob("*.safetensors"))
    return path.name.lower().endswith(GGUF) and path.is_file() and not NO_MODEL.match(path.name)


def _size(path: Path) -> int:
    """The size of all its files in bytes."""
    if path.is_dir():
        return sum(p.stat().st_size for p in path.glob("*.safetensors"))
    if FIRST_PART.search(path.name[: -len(GGUF)]):
        return sum(p.stat().st_size for p in _parts(path))
    return path.stat().st_size


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
