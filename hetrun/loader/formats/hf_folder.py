"""A model's folder as Hugging Face publishes it: settings in JSON, weights in safetensors files.

Nothing in it is run, whatever its settings ask for. Names in the index lead to files of this folder and
nowhere else, because they were downloaded. Links are followed: caches of Hugging Face are made of them, and
making one takes the right to write here. What they lead to must be a regular file, checked like any other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetrun.errors import ModelFileError
from hetrun.graph import Weight
from hetrun.loader.formats.gguf_file import shown
from hetrun.loader.formats.json_file import MAX_BYTES, once, read_bytes, read_object
from hetrun.loader.formats.safetensors import SafetensorsFile, read_safetensors
from hetrun.loader.hf_mapping import Config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARDS = 4096
MAX_NAME = 255  # bytes of a file's name, on every system


class ShardTensors(Mapping[str, Weight]):
    """The tensors of all shards as matrices. One that hetrun cannot read is refused when it is asked for."""

    def __init__(self, shards: Mapping[str, SafetensorsFile]) -> None:
        """`shards` holds the file of each tensor."""
        self._shards = shards

    def __getitem__(self, name: str) -> Weight:
        return self._shards[name].weight(name)

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


@dataclass(frozen=True, slots=True)
class Folder:
    """A model's folder, the headers of its shards read and checked."""

    path: Path
    config: Config
    shards: tuple[SafetensorsFile, ...]
    tensors: ShardTensors
    _read: dict[str, Config] = field(default_factory=dict, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(s.size for s in self.shards)

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return (self.path / name).exists()

    def settings(self, name: str) -> Config:
        """A JSON file beside config.json, read once; no settings where there is none."""
        if name not in self._read:
            path = self.path / name
            self._read[name] = Config(str(path), read_object(path) if path.exists() else {})
        return self._read[name]

    def text(self, name: str) -> str | None:
        """A text file beside config.json, if it is there."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            return read_bytes(path, MAX_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise ModelFileError(str(path), f"byte {e.start} is not UTF-8") from e


def read_folder(path: str | os.PathLike[str]) -> Folder:
    """A model's folder, named itself or by a file in it."""
    named = Path(path)
    folder = named if os.path.isdir(named) else named.parent
    if not os.path.exists(folder / "config.json"):
        raise ModelFileError(str(folder), f"has no config.json, so it is not a model folder; {_hint(folder)}")
    config = Config(str(folder / "config.json"), read_object(folder / "config.json"))
    wanted = named.name if folder != named and named.suffix == ".safetensors" else None
    index = _read_index(folder) if (folder / INDEX).exists() else {}
    if (file := _choose_file(folder, wanted, index)) is not None:
        shard = read_safetensors(folder / file)
        return Folder(folder, config, (shard,), ShardTensors(dict.fromkeys(shard.tensors, shard)))
    shards = _read_shards(folder, index)
    tensors = ShardTensors({name: shards[at] for name, at in index.items()})
    return Folder(folder, config, tuple(shards.values()), tensors)


def _choose_file(folder: Path, wanted: str | None, index: Mapping[str, str]) -> str | None:
    """The one file with the weights; None where they lie in those of the index."""
    if wanted is not None:
        return None if wanted in index.values() else wanted
    if (folder / SINGLE).exists():  # before an index, if both are there, as in transformers
        return SINGLE
    return None if index else _only_file(folder)


def _hint(folder: Path) -> str:
    found = sorted(p.name for p in folder.glob("*.gguf"))
    if found:
        return f"name the GGUF file in it: {', '.join(found[:3])}{', ...' if found[3:] else ''}"
    return "give a .gguf file, or a folder with config.json and *.safetensors"


def _only_file(folder: Path) -> str:
    """The one safetensors file of a folder that has it under a name of its own."""
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelFileError(
            str(folder),
            f"has {len(found)} safetensors files, but neither {SINGLE} nor {INDEX} to say which belong "
            "together: download it again, or name one of them",
        )
    if pickles := sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt*"))):
        raise ModelFileError(
            str(folder),
            f"has its weights in {pickles[0]}, which can run arbitrary code, so hetrun does not open it: "
            "get the model as safetensors or GGUF",
        )
    raise ModelFileError(str(folder), f"has no {SINGLE}: download the model again")


def _read_index(folder: Path) -> dict[str, str]:
    """Which file each tensor lies in."""
    path = str(folder / INDEX)
    found = read_object(path, once).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelFileError(path, "weight_map must be a table that says which file each tensor lies in")
    for tensor, name in found.items():
        # The name comes from a stranger and becomes a path: it may only lead into this folder.
        if not _is_name(name):
            raise ModelFileError(
                path,
                f"the tensor {shown(tensor)} lies in {shown(str(name))}, which is not the name of a "
                ".safetensors file in this folder",
            )
    return found


def _is_name(name: object) -> bool:
    """Whether it can be the name of a file in a folder, and of no other."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or {*name} & {*"/\\\0"}:
        return False
    return len(name.encode("utf-8", "replace")) <= MAX_NAME


def _read_shards(folder: Path, index: Mapping[str, str]) -> dict[str, SafetensorsFile]:
    names = sorted(set(index.values()))
    if len(names) > MAX_SHARDS:
        raise ModelFileError(
            str(folder / INDEX), f"names {len(names)} files, hetrun reads up to {MAX_SHARDS}"
        )
    if missing := [name for name in names if not (folder / name).exists()]:
        raise ModelFileError(str(folder), f"{_list(missing)} missing: download the rest of the model")
    shards = {name: read_safetensors(folder / name) for name in names}
    for tensor, name in index.items():
        if tensor not in shards[name].tensors:
            raise ModelFileError(
                str(folder / name), f"the tensor {shown(tensor)} is not in it, but {INDEX} lists it"
            )
    return shards


def _list(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{shown(names[0])} is"
    return f"{len(names)} of its files are, {shown(names[0])} first,"
