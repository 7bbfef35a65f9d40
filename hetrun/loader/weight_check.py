"""What weights show of damage: NaN and infinity among them and the scales of their blocks, and holes.

Only floats can be NaN, and a block has few of them: looking at those alone is as fast as reading the file. It
is read in slices, so that memory does not grow with it. A changed byte shows in nothing but a checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hetrun.errors import ModelFileError
from hetrun.graph import Extent, Weight
from hetrun.graph.quant import Bytes, QuantType
from hetrun.loader.formats.gguf_file import shown
from hetrun.loader.gguf_source import GGUFModel
from hetrun.loader.source import ModelSource
from hetrun.loader.weight_reader import FileReader
from hetrun.loader.zero_runs import ZeroFinder, Zeros
from hetrun.system.units import counted, format_bytes

SLICE = 1 << 20  # bytes that are looked at in one go: they are still in the processor's cache then

MOST_REMARKS = 3  # tensors that are named
TABLES = ("token_embd.weight", "output.weight")
NO_ZEROS = Zeros()

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Floats:
    """Floats that stand next to each other in a block; one is not finite where all bits of `ones` are set."""

    code: str  # of the unsigned number that has the same bits
    ones: int
    at: int = 0
    count: int = 1

    @property
    def size(self) -> int:
        """Bytes of one."""
        return np.dtype(self.code).itemsize

    def wrong(self, blocks: Bytes) -> npt.NDArray[np.bool_]:
        """[blocks, count]: which are not finite."""
        bits: Any = blocks[:, self.at : self.at + self.count * self.size].view(self.code)
        found: npt.NDArray[np.bool_] = (bits & bits.dtype.type(self.ones)) == self.ones
        return found


def _halves(at: int, count: int = 1) -> Floats:
    return Floats("<u2", 0x7C00, at, count)


# Where each type has its floats; all other bits are whole numbers.
FLOATS = {
    "F32": Floats("<u4", 0x7F800000),
    "F16": _halves(0),
    "BF16": Floats("<u2", 0x7F80),
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "Q1_0", "Q2_0"), _halves(0)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), _halves(0, 2)),
    "Q2_K": _halves(80, 2),
    "Q3_K": _halves(108),
    "Q6_K": _halves(208),
    **dict.fromkeys(("IQ4_XS", "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), _halves(0)),
    "IQ1_M": Floats("<u4", 0x7000C000, 52),  # a float16 in four pieces; the exponent lies in these two
    "TQ1_0": _halves(52),
    "TQ2_0": _halves(64),
    "MXFP4": Floats("u1", 0xFC),  # powers of two: NaN, and those from which weights overflow
    "NVFP4": Floats("u1", 0x7F, 0, 4),  # E4M3 has a NaN and no infinity
}


@dataclass(frozen=True, slots=True)
class Hole:
    """Zero bytes among the weights of a tensor."""

    tensor: str
    row: int  # where the first of them are
    bytes: int  # all of them
    path: str
    offset: int  # of the first of them in that file


class HoleError(ModelFileError):
    """Weights have holes; the tensor with the most comes first."""

    def __init__(self, path: str, reason: str, holes: tuple[Hole, ...]) -> None:
        super().__init__(path, reason)
        self.holes = holes

    def __reduce__(self) -> tuple[type[ModelFileError], tuple[Any, ...]]:
        return (type(self), (self.path, self.reason, self.holes))


@dataclass(frozen=True, slots=True)
class WeightFinding:
    """What weights show: the first thing that is wrong, or what is worth knowing if nothing is."""

    error: ModelFileError | None = None
    remarks: tuple[str, ...] = ()


def first_bad_value(source: ModelSource, progress: Progress | None = None) -> ModelFileError | None:
    """The first tensor with a number that is not finite, or with a hole: where that is and how much of it."""
    return look_at_weights(source, progress).error


def look_at_weights(source: ModelSource, progress: Progress | None = None) -> WeightFinding:
    """Read all of them. The first number that is not finite ends it; holes are told together."""
    zeros = list[tuple[Weight, Zeros]]()
    weights = sorted(_weights(source), key=_place)
    total, done = sum(w.nbytes for w in weights) or 1, 0
    reader, buffer = FileReader(), np.empty(SLICE, np.uint8)
    try:
        for weight in weights:
            finder = ZeroFinder(weight.shape[0], weight.quant.row_bytes(weight.shape[1]))
            if error := _look(weight, reader, buffer, finder):
                return WeightFinding(error)
            if (found := finder.found()) != NO_ZEROS and weight.shape[0] > 1:  # vectors may be zero
                zeros.append((weight, found))
            done += weight.nbytes
            if progress:
                progress(done / total)
    finally:
        reader.close()
    holes = [_hole(weight, found) for weight, found in zeros if found.hole_bytes]
    return WeightFinding(_hole_error(holes)) if holes else WeightFinding(remarks=tuple(_remarks(zeros)))


def _hole(weight: Weight, zeros: Zeros) -> Hole:
    """With its place in the file."""
    path, offset = _byte_of(weight, zeros.hole_begin)
    return Hole(weight.name, zeros.hole_row, zeros.hole_bytes, path, offset)


def _byte_of(weight: Weight, at: int) -> tuple[str, int]:
    """Where a byte of a tensor lies, by its offset within the tensor."""
    parts = [part for part in weight.parts if isinstance(part, Extent)]
    for part in parts:
        if at < part.rows * part.row_bytes:
            row, behind = divmod(at, part.row_bytes)
            return part.path, part.offset + row * part.stride + behind
        at -= part.rows * part.row_bytes
    raise AssertionError("a hole lies in its tensor")


def _hole_error(holes: Sequence[Hole]) -> HoleError:
    worst, *more = holes = sorted(holes, key=lambda hole: -hole.bytes)
    total = format_bytes(sum(hole.bytes for hole in holes))
    in_all = f"; with {counted(len(more), 'other tensor')} it is {total} in all" if more else ""
    return HoleError(
        worst.path,
        f"the tensor {shown(worst.tensor)} has {format_bytes(worst.bytes)} of zero bytes among its weights, "
        f"from row {worst.row} (byte {worst.offset} of the file) on{in_all}: an interrupted download or a "
        "failing disk leaves such runs of zeros; download it again",
        tuple(holes),
    )


def _remarks(zeros: Sequence[tuple[Weight, Zeros]]) -> Iterator[str]:
    """Zeros that may be meant."""
    empty = [weight.name for weight, found in zeros if found.is_all]
    if empty:
        others = f" and {counted(len(empty) - 1, 'other tensor')}" if len(empty) > 1 else ""
        yield f"all weights of {shown(empty[0])}{others} are zero"
    some = [(weight, found) for weight, found in zeros if not found.is_all]
    for weight, found in some[:MOST_REMARKS]:
        padded = "padding of the vocabulary" if weight.name in TABLES else "padding"
        yield (
            f"{counted(found.rows, 'row')} of {shown(weight.name)} ({weight.shape[0]:,} rows) hold only "
            f"zeros, from row {found.first_row} on, usually {padded}"
        )
    if len(some) > MOST_REMARKS:
        yield f"rows of {counted(len(some) - MOST_REMARKS, 'other tensor')} hold only zeros as well"


def _weights(source: ModelSource) -> Iterator[Weight]:
    """Every weight that lies in a file, once."""
    seen = set()
    for weight in _tensors(source):
        if isinstance(weight.parts[0], Extent) and weight.parts not in seen:
            seen.add(weight.parts)
            yield weight


def _tensors(source: ModelSource) -> Iterator[Weight]:
    if not isinstance(source, GGUFModel):
        yield from source.weights()
        return
    for info in source.file.tensors.values():
        # A tensor whose type is none for weights is not used.
        if isinstance(info.quant, QuantType) and (weight := source.find(info.name)):
            yield weight


def _place(weight: Weight) -> tuple[str, int]:
    part = weight.parts[0]
    return (part.path, part.offset) if isinstance(part, Extent) else ("", 0)


@dataclass(slots=True)
class _TensorFault:
    """What is wrong with a tensor so far: how many values, and the first of them."""

    count: int = 0
    path: str = ""
    at: int = 0
    row: int = 0


def _look(weight: Weight, reader: FileReader, buffer: Bytes, zeros: ZeroFinder) -> ModelFileError | None:
    floats, found, row = FLOATS[weight.quant.name], _TensorFault(), 0
    for part in weight.parts:
        if not isinstance(part, Extent):
            continue
        for skip, blocks in _slices(weight, part, reader, buffer):
            zeros.take(blocks.reshape(-1))
            wrong = floats.wrong(blocks)
            if not wrong.any():
                continue
            if not found.count:
                block, which = np.unravel_index(wrong.argmax(), wrong.shape)
                behind = skip + int(block) * weight.quant.block_bytes
                found.path, found.row = part.path, row + behind // part.stride
                found.at = part.offset + behind + floats.at + int(which) * floats.size
            found.count += int(wrong.sum())
        row += part.rows
    return _error(weight, floats, found) if found.count else None


def _slices(weight: Weight, part: Extent, reader: FileReader, buffer: Bytes) -> Iterator[tuple[int, Bytes]]:
    """Whole blocks of a part, [blocks, block_bytes], and how far behind its beginning they lie."""
    size = weight.quant.block_bytes
    step = len(buffer) // size * size
    # Rows that follow each other in the file are one run.
    runs, length = (
        (1, part.rows * part.stride) if part.stride == part.row_bytes else (part.rows, part.row_bytes)
    )
    for run in range(runs):
        for at in range(0, length, step):
            raw = buffer[: min(step, length - at)]
            reader.fill(raw.data, part, run * part.stride + at, weight.name)
            yield run * part.stride + at, raw.reshape(-1, size)


def _error(weight: Weight, floats: Floats, found: _TensorFault) -> ModelFileError:
    n_blocks = weight.shape[0] * weight.shape[1] // weight.quant.block
    what = "weights" if weight.quant.block == 1 else "scales"
    return ModelFileError(
        found.path,
        f"the tensor {shown(weight.name)} has NaN or infinity among its {weight.quant.name} {what}: "
        f"{found.count} of {n_blocks * floats.count}, the first at byte {found.at}, in row {found.row}; "
        "get or convert it again",
    )
