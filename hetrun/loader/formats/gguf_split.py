"""Models split into several GGUF files, as llama.cpp does it: `name-00001-of-00003.gguf` and so on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hetrun.errors import ModelFileError
from hetrun.loader.formats.gguf_file import GGUFFile, TensorInfo, shown

MAX_PARTS = 4096
_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def join_parts(file: GGUFFile, read: Callable[[str], GGUFFile]) -> GGUFFile:
    """The whole model of which this file is a part; settings and vocabulary stand in the first part."""
    count = file.get_int("split.count", 1, 0, MAX_PARTS)
    if count <= 1:
        return file
    number = file.require_int("split.no", 0, count - 1)
    name = Path(file.path).name
    match = _NAME.fullmatch(name)
    if match is None or (int(match[2]), int(match[3])) != (number + 1, count):
        raise ModelFileError(
            file.path,
            f"is part {number + 1} of {count} of a split model, so its name must end in "
            f"-{number + 1:05}-of-{count:05}.gguf, as the other parts' do: rename it back",
        )
    paths = [
        str(Path(file.path).with_name(f"{match[1]}-{i + 1:05}-of-{count:05}.gguf")) for i in range(count)
    ]
    if missing := [path for path in paths if not Path(path).exists()]:
        which = shown(Path(missing[0]).name)
        said = f"{which} is" if len(missing) == 1 else f"{len(missing)} parts are, {which} first,"
        raise ModelFileError(file.path, f"is one of {count} parts, but {said} missing: download the rest")
    parts = [file if i == number else read(path) for i, path in enumerate(paths)]
    for i, part in enumerate(parts):
        _check_part(parts[0], part, i, count)
    return replace(
        parts[0],
        size=sum(p.size for p in parts),
        tensors=_join_tensors(parts),
        stamps={path: stamp for p in parts for path, stamp in p.stamps.items()},
    )


def _check_part(first: GGUFFile, part: GGUFFile, index: int, count: int) -> None:
    """Whether a part is what its name says, and of this model."""
    found = (part.get_int("split.no", 0, 0, 1 << 16) + 1, part.get_int("split.count", 1, 0, 1 << 16))
    if found != (index + 1, count):
        raise ModelFileError(
            part.path, f"is part {found[0]} of {found[1]}, but its name says {index + 1}: download it again"
        )
    # The later parts may leave the model's own settings out.
    for key in ("split.tensors.count", "general.architecture", "general.name"):
        if (said := _says(part, key)) is not None and said != _says(first, key):
            raise ModelFileError(
                part.path, f"belongs to another model than {Path(first.path).name}: their {key} differ"
            )


def _says(file: GGUFFile, key: str) -> int | str | None:
    """What a part says of the whole model; None where it says nothing."""
    if key not in file.metadata:
        return None
    return file.require_int(key, 0, 1 << 31) if key.startswith("split.") else file.require_str(key)


def _join_tensors(parts: Sequence[GGUFFile]) -> dict[str, TensorInfo]:
    joined: dict[str, TensorInfo] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in joined:
                raise ModelFileError(
                    part.path, f"the tensor {shown(name)} is also in {Path(joined[name].path).name}"
                )
            joined[name] = tensor
    said = parts[0].get_int("split.tensors.count", len(joined), 0, 1 << 31)
    if said != len(joined):
        raise ModelFileError(
            parts[0].path,
            f"its {len(parts)} parts have {len(joined)} tensors, but it says {said}: they are of two models, "
            "or one was split wrongly; download them again",
        )
    return joined
