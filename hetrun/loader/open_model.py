"""Opens a model by its path: a GGUF file, a Hugging Face folder, or what a plugin reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from hetrun.errors import ModelFileError, printable, system_faults
from hetrun.loader import half_repacked
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.gguf_source import GGUFModel
from hetrun.loader.source import ModelSource
from hetrun.system import entry_points


def is_folder(path: Path) -> bool:
    """Whether a path means a model's folder; it may be named by a file in it."""
    return os.path.isdir(path) or path.suffix in (".safetensors", ".json")


def file_in(folder: Path) -> Path | None:
    """The GGUF file of a folder that has one model and nothing but that; None: it has several, or others."""
    from hetrun.loader.hub.select import RepositoryFile, ggufs  # on use: most name a file

    if not os.path.isdir(folder) or (folder / "config.json").exists():
        return None
    found = list(ggufs(RepositoryFile(path.name, 0) for path in folder.glob("*") if path.is_file()).values())
    return folder / found[0].files[0].name if len(found) == 1 else None


def open_model(path: Path) -> ModelSource:
    """Read what is known of a model without its weights."""
    with system_faults(f"{printable(str(path))} was not opened"):
        return _open_model(path)


def _open_model(path: Path) -> ModelSource:
    path = file_in(path) or path
    if is_folder(path):
        from hetrun.loader.hf_source import open_folder  # on use: most models are GGUF files

        return open_folder(path)
    if point := entry_points.find("sources", path.suffix.removeprefix(".")):
        return _read_by(point, path)
    if reason := half_repacked.reason_against(path):
        raise ModelFileError(str(path), reason)
    file = read_gguf(path)
    return GGUFModel(file, file.require_str("general.architecture"))


def _read_by(point: entry_points.PluginPoint, path: Path) -> ModelSource:
    """What a plugin's reader makes of a file."""
    read = cast("Callable[[Path], ModelSource]", entry_points.load(point))
    whose = f"the reader {point.name} of {point.whose}"
    with entry_points.blamed(
        lambda e: ModelFileError(str(path), f"{whose} fails: {entry_points.in_words(e)}")
    ):
        return read(path)
