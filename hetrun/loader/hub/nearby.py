"""Models that lie in a folder, to suggest where a name is mistyped."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path

MOST_LOOKED_AT = 5000  # entries of a folder: an error must not take seconds
# The first part stands for all of a split model; a projector of pictures belongs to another model.
NO_MODEL = re.compile(r"-(?!00001-)\d{5}-of-\d{5}\.gguf$|mmproj", re.IGNORECASE)


def gguf_files(folder: Path = Path()) -> list[str]:
    """The names of the .gguf files in a folder; of a model in parts, the first."""
    return [name for name in _names_in(folder) if _is_gguf(name) and (folder / name).is_file()]


def models_beside(path: str) -> dict[str, str]:
    """The .gguf files and model folders in the folder of a path that does not exist: their names, and how
    they would be typed."""
    typed, slash, _ = path.rstrip("/").rpartition("/")
    folder = Path(typed + slash).expanduser()
    return {
        found: f"{typed}{slash}{found}"
        for found in _names_in(folder)
        if (_is_gguf(found) and (folder / found).is_file()) or _is_model_folder(folder / found)
    }


def _names_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            found = [entry.name for entry in islice(entries, MOST_LOOKED_AT)]
    except (OSError, ValueError):  # ValueError: a name with a null byte
        return []
    return sorted(name for name in found if not name.startswith("."))


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf") and not NO_MODEL.search(name)


def _is_model_folder(path: Path) -> bool:
    if not path.is_dir():
        return False
    names = _names_in(path)
    return any(map(_is_gguf, names)) or (
        "config.json" in names and any(name.endswith(".safetensors") for name in names)
    )
