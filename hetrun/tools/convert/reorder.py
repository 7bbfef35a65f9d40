"""A GGUF file with its tensors in the order in which a pass reads them, each where direct reads can begin.

Models that do not fit into memory are read from disk for every pass: large reads of whole pages, one behind
the other. Nothing but places changes, so every other program reads the new file as it read the old one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from hetrun.backend.fusion import Common, kin
from hetrun.errors import OptionError
from hetrun.graph import Extent, Graph, Op
from hetrun.graph.quant import Bytes
from hetrun.loader.architectures import build_graph, is_known
from hetrun.loader.formats.gguf_file import GGUFFile, TensorInfo
from hetrun.loader.gguf_source import GGUFModel
from hetrun.loader.open_model import is_folder, open_model
from hetrun.loader.weight_reader import FileReader
from hetrun.system.file_identity import Stamp
from hetrun.tools.convert.gguf_writer import (
    ALIGNMENT_KEY,
    MetaValue,
    Stored,
    check_target,
    target_path,
    write_model,
)

ALIGNMENT = 4096  # what direct reads ask of offsets, on any disk
PIECE_BYTES = 4 << 20  # copied in one go
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody asked for; `force`: replace a file that is there, repack what is repacked already."""

    source: Path
    output: Path | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What was done; without `written` the model was as it should be, and `path` is the model itself."""

    path: Path
    written: bool
    tensors: int
    alignment: int
    bytes_before: int
    bytes_after: int
    seconds: float
    notes: tuple[str, ...]


def repack_model(wish: Wish, progress: Callable[[float], None] | None = None) -> Report:
    """Repack a model; the file is complete when this returns, and not there when it raises."""
    begin = perf_counter()
    source = _open(wish.source)
    file, tensors = source.file, in_order(source)
    notes = () if is_known(source.architecture) else (_unknown(source.architecture),)
    path, written, size = Path(file.path), False, file.size
    if wish.force or not is_repacked(file, tensors):
        path, written = target(wish, file), True
        _check_other(path, file)
        check_target(path, wish.force)
        with closing(_copied(tensors, progress)) as pieces:
            size = write_model(path, metadata(file), tensors, pieces, wish.force)
    seconds = perf_counter() - begin
    return Report(path, written, len(tensors), ALIGNMENT, file.size, size, seconds, notes)


def _open(path: Path) -> GGUFModel:
    if is_folder(path):
        raise OptionError(
            f"{path} is no GGUF file; `hetrun convert` writes one of a folder of safetensors, "
            "which can be repacked then"
        )
    source = open_model(path)
    assert isinstance(source, GGUFModel)
    return source


def _unknown(architecture: str) -> str:
    return (
        f"hetrun does not run the architecture {architecture[:40]!r} itself: its tensors stand in the order "
        "of layers, and within a layer as before"
    )


def target(wish: Wish, file: GGUFFile) -> Path:
    """Where the new file goes."""
    stem = Path(file.path).stem
    if len(file.paths) > 1:
        stem = _PART.sub("", stem)
    return target_path(wish.output, f"{stem}-aligned.gguf")


def _check_other(path: Path, file: GGUFFile) -> None:
    """Refuse the model itself as the new file, by whatever name."""
    try:
        status = path.stat()
    except OSError:
        return  # nothing is there
    if any((s.device, s.inode) == (status.st_dev, status.st_ino) for s in file.stamps.values()):
        raise OptionError(f"{path} is the model itself, which is kept; name another file with -o")


def is_repacked(file: GGUFFile, tensors: Sequence[TensorInfo]) -> bool:
    """Whether the file is laid out already as it would be written."""
    stands = sorted(file.tensors.values(), key=lambda t: t.offset)
    return len(file.paths) == 1 and file.alignment % ALIGNMENT == 0 and stands == [*tensors]


# --- the order


def in_order(source: GGUFModel) -> list[TensorInfo]:
    """The tensors in the order in which a pass needs them; those that none needs come last."""
    tensors = source.file.tensors.values()
    if not is_known(source.architecture):
        return sorted(tensors, key=lambda t: _by_name(t.name))
    at = _Places(tensors)
    used = dict.fromkeys(at.find(extent) for extent in _reads(build_graph(source)))
    return list(dict.fromkeys([*used, *tensors]))


def _reads(graph: Graph) -> Iterator[Extent]:
    """What a pass reads. Products of one input and type are one product, where the first of them stands."""
    together = kin(graph.ops, _common)
    for op in graph.ops:
        for member in together.get(_common(op), (op,)):
            for weight in member.weights:
                yield from (part for part in weight.parts if isinstance(part, Extent))


def _common(op: Op) -> Common:
    return (op.inputs, op.weights[0].quant) if op.kind == "linear" else ()


class _Places:
    """Finds the tensor that a part of a weight lies in."""

    def __init__(self, tensors: Iterable[TensorInfo]) -> None:
        self._tensors: dict[str, list[TensorInfo]] = defaultdict(list)
        for tensor in sorted(tensors, key=lambda t: t.offset):
            self._tensors[tensor.path].append(tensor)

    def find(self, extent: Extent) -> TensorInfo:
        those = self._tensors[extent.path]
        return those[bisect_right(those, extent.offset, key=lambda t: t.offset) - 1]


def _by_name(name: str) -> tuple[int, int]:
    """Blocks by number, the last norm and the head behind them, all else before."""
    if block := _BLOCK.search(name):
        return 1, int(block[1])
    return (2, 0) if name.startswith("output") else (0, 0)


# --- the file


def metadata(file: GGUFFile) -> dict[str, MetaValue]:
    """Every key with its type and value as they stand in the file, but for those about its layout."""
    out: dict[str, MetaValue] = {}
    stamp = file.stamps[file.path]
    with closing(FileReader()) as reader:
        for key, (begin, end) in file.spans.items():
            if len(file.paths) == 1 or not key.startswith("split."):
                out[key] = Stored(_stored(reader, file.path, stamp, key, begin, end))
    return {**out, ALIGNMENT_KEY: ALIGNMENT}


def _stored(reader: FileReader, path: str, stamp: Stamp, key: str, begin: int, end: int) -> bytes:
    raw, n = bytearray(end - begin), end - begin
    reader.fill(memoryview(raw), Extent(path, begin, 1, n, n, stamp), 0, key)
    return bytes(raw)


def _copied(
    tensors: Sequence[TensorInfo], progress: Callable[[float], None] | None
) -> Generator[tuple[int, Bytes], None, None]:
    """The bytes of the tensors in pieces, each good until the next is asked for."""
    total, done = sum(t.nbytes for t in tensors) or 1, 0
    buffer = np.empty(PIECE_BYTES, np.uint8)
    with closing(FileReader()) as reader:
        for index, t in enumerate(tensors):
            whole = Extent(t.path, t.offset, 1, t.nbytes, t.nbytes, t.stamp)
            for at in range(0, t.nbytes, PIECE_BYTES):
                piece = buffer[: min(PIECE_BYTES, t.nbytes - at)]
                reader.fill(piece.data, whole, at, t.name)
                yield index, piece
                done += len(piece)
                if progress:
                    progress(done / total)
