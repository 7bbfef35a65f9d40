"""A GGUF file with its tensors in the order in which a pass reads them, each where direct reads can begin.

Models that do not fit into memory are read from disk for every pass: large reads of whole pages, one behind
the other. Nothing but places changes, so every other program reads the new file as it read the old one. But
of mixtures each expert becomes a record of its own (expert_records.py), unless that is not wanted.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from hetrun.backend.fusion import Common, kin
from hetrun.errors import ModelFileError, OptionError, system_faults
from hetrun.graph import Extent, Graph, Op
from hetrun.graph.quant import Bytes
from hetrun.loader.architectures import build_graph, is_known, plugged, prediction_block
from hetrun.loader.formats.gguf_file import GGUFFile, TensorInfo
from hetrun.loader.gguf_source import GGUFModel
from hetrun.loader.open_model import is_folder, open_model
from hetrun.loader.weight_reader import FileReader
from hetrun.system.file_identity import Stamp
from hetrun.tools.convert import expert_records, in_place
from hetrun.tools.convert.expert_records import RecordTensor
from hetrun.tools.convert.gguf_writer import (
    ALIGNMENT_KEY,
    MetaValue,
    StoredValue,
    check_target,
    header,
    size_of,
    target_path,
    write_model,
)

ALIGNMENT = 4096  # what direct reads ask of offsets, on any disk
PIECE_BYTES = 4 << 20  # copied in one go
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class RepackOptions:
    """What was asked for. `force`: replace a file that is there, repack what is repacked already; `merged`:
    the matrices of all experts in one tensor; `in_place`: on a disk without room for a second file."""

    source: Path
    output: Path | None = None
    force: bool = False
    merged: bool = False
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class RepackReport:
    """What was done; without `written` the model was as it should be, and `path` is the model itself."""

    path: Path
    written: bool
    tensors: int
    records: int  # experts whose matrices lie beside each other
    alignment: int
    bytes_before: int
    bytes_after: int
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorOrder:
    """The tensors of the file to be, in order, and sentences for the user."""

    tensors: Sequence[RecordTensor]
    notes: tuple[str, ...] = ()


RECORDS = (
    "llama.cpp (and so --backend libllama) does not read a mixture whose experts are records; "
    "`hetrun repack --merged` puts them together again"
)


def repack_model(wish: RepackOptions, progress: Callable[[float], None] | None = None) -> RepackReport:
    """Repack a model; the file is complete when this returns, and not there when it raises. In place it is
    half done when it raises, and a later call goes on."""
    with system_faults("the model was not repacked"):
        return _repack_model(wish, progress)


def _repack_model(wish: RepackOptions, progress: Callable[[float], None] | None) -> RepackReport:
    begin = perf_counter()
    if wish.in_place:
        if wish.output is not None:
            raise OptionError("--in-place rewrites the file itself: leave out -o")
        if (done := in_place.finish(wish.source, progress)) is not None:
            return _report(wish.source, _finished(wish.source), True, done, begin)
    source = _open(wish.source)
    file, found = source.file, layout(source, wish.merged)
    path, size = Path(file.path), file.size
    if not wish.force and is_repacked(file, found.tensors):
        return _report(path, found, False, (size, size), begin)
    if wish.in_place:
        start = header(metadata(file), found.tensors)
        size = size_of(start, found.tensors, ALIGNMENT)
        in_place.begin(file, start, size, progress)
    else:
        path = target(wish, file)
        _check_other(path, file)
        check_target(path, wish.force)
        with closing(_copied(found.tensors, progress)) as pieces:
            size = write_model(path, metadata(file), found.tensors, pieces, wish.force)
    return _report(path, found, True, (file.size, size), begin)


def _report(
    path: Path, found: TensorOrder, written: bool, sizes: tuple[int, int], begin: float
) -> RepackReport:
    n, records = len(found.tensors), expert_records.count(found.tensors)
    notes = (*found.notes, *([RECORDS] if records else []))
    return RepackReport(path, written, n, records, ALIGNMENT, *sizes, perf_counter() - begin, notes)


def _finished(path: Path) -> TensorOrder:
    """What lies in a file whose repacking an earlier call began."""
    tensors = _open(path).file.tensors.values()
    note = "it was finished with the options it was started with"
    return TensorOrder([RecordTensor.of(t.name, t.shape, [t]) for t in tensors], (note,))


def _open(path: Path) -> GGUFModel:
    if is_folder(path):
        raise OptionError(
            f"{path} is not a GGUF file; `hetrun convert` makes one from a folder of safetensors, "
            "which can then be repacked"
        )
    source = open_model(path)
    assert isinstance(source, GGUFModel)
    return source


def _unknown(architecture: str) -> str:
    return (
        f"hetrun does not run the architecture {architecture[:40]!r} itself: its tensors stand in the order "
        "of layers, and within a layer as before"
    )


def target(wish: RepackOptions, file: GGUFFile) -> Path:
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
        raise OptionError(f"{path} is the model itself, which must be kept; name another file with -o")


def is_repacked(file: GGUFFile, tensors: Sequence[RecordTensor]) -> bool:
    """Whether the file is laid out already as it would be written."""
    stands = sorted(file.tensors.values(), key=lambda t: t.offset)
    aligned = len(file.paths) == 1 and file.alignment % ALIGNMENT == 0
    return aligned and [t.name for t in stands] == [t.name for t in tensors]


# --- the order


def layout(source: GGUFModel, merged: bool = False) -> TensorOrder:
    """The tensors in the order in which a pass needs them; those that none needs come last."""
    if not is_known(source):
        order = sorted(source.file.tensors.values(), key=lambda t: _by_name(t.name))
        arranged = expert_records.together if merged else expert_records.in_records
        return TensorOrder(arranged(order), (_unknown(source.architecture),))
    if merged:
        return TensorOrder(expert_records.together(in_order(source)))
    tensors = expert_records.apart(source.file.tensors)
    if len(tensors) > len(source.file.tensors) and plugged(source.architecture) is None:
        # Whether an architecture reads experts of their own, it says itself.
        with suppress(ModelFileError):
            return TensorOrder(expert_records.in_records(in_order(_with(source, tensors))))
    return TensorOrder(expert_records.in_records(in_order(source)))


def _with(source: GGUFModel, tensors: Mapping[str, TensorInfo]) -> GGUFModel:
    return replace(source, file=replace(source.file, tensors=tensors))


def in_order(source: GGUFModel) -> list[TensorInfo]:
    """Its tensors as a pass reads them, then those of the block that predicts, then all others."""
    tensors = source.file.tensors.values()
    at = _Places(tensors)
    graphs = [build_graph(source)]
    with suppress(ModelFileError):  # who cannot use the block can do without
        if block := prediction_block(source):
            graphs.append(block.graph)
    used = dict.fromkeys(at.find(extent) for graph in graphs for extent in _reads(graph))
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
                out[key] = StoredValue(_stored(reader, file.path, stamp, key, begin, end))
    return {**out, ALIGNMENT_KEY: ALIGNMENT}


def _stored(reader: FileReader, path: str, stamp: Stamp, key: str, begin: int, end: int) -> bytes:
    raw, n = bytearray(end - begin), end - begin
    reader.fill(memoryview(raw), Extent(path, begin, 1, n, n, stamp), 0, key)
    return bytes(raw)


def _copied(
    tensors: Sequence[RecordTensor], progress: Callable[[float], None] | None
) -> Generator[tuple[int, Bytes], None, None]:
    """The bytes of the tensors in pieces, each good until the next is asked for."""
    total, done = sum(t.nbytes for t in tensors) or 1, 0
    buffer = np.empty(PIECE_BYTES, np.uint8)
    with closing(FileReader()) as reader:
        for index, part, at in _pieces(tensors):
            piece = buffer[: min(PIECE_BYTES, part.row_bytes - at)]
            reader.fill(piece.data, part, at, tensors[index].name)
            yield index, piece
            done += len(piece)
            if progress:
                progress(done / total)


def _pieces(tensors: Sequence[RecordTensor]) -> Iterator[tuple[int, Extent, int]]:
    """The tensor's number, a part of it, and where in that part a piece begins."""
    for index, t in enumerate(tensors):
        for part in t.parts:
            yield from ((index, part, at) for at in range(0, part.row_bytes, PIECE_BYTES))
