"""A bounded reader of safetensors headers, with the same care as the one of GGUF.

A file is eight bytes of length, that much JSON, and the tensors' bytes: without gaps, to the file's end.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeGuard

from hetrun.errors import ModelFileError
from hetrun.graph import Extent, Weight
from hetrun.graph.quant import RAW, by_name
from hetrun.loader.formats.bounded_reader import DAMAGED, U64, Cursor, mistaken, open_cursor
from hetrun.loader.formats.gguf_file import shown
from hetrun.loader.formats.json_file import once, parse_object
from hetrun.system.file_identity import Stamp
from hetrun.system.strict_json import fault_in_json

MAX_HEADER = 100_000_000  # the format's own
MAX_DIMS = 16

# Bits of an element. What hetrun computes with has the same name as a quantisation type.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_FLOATS = ("F32", "F16", "BF16")
# Bytes are no weights, but some architectures make weights of them.
_READ = {RAW.name: RAW} | {name: by_name(name) for name in _FLOATS}
_FIELDS = ("dtype", "shape", "data_offsets")


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a tensor lies in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int


@dataclass(frozen=True, eq=False)
class SafetensorsFile:
    """The checked header of a safetensors file."""

    path: str
    stamp: Stamp
    tensors: Mapping[str, TensorLocation]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.stamp.size

    def weight(self, name: str) -> Weight:
        """A tensor as a matrix: a vector is one row; those of a third dimension lie on top of each other."""
        t = self.tensors[name]
        if (quant := _READ.get(t.dtype)) is None:
            raise not_computed_with(self.path, name, t.dtype)
        if not t.nbytes:
            raise ModelFileError(
                self.path, f"the tensor {shown(name)} is empty: its shape is {list(t.shape)}"
            )
        cols = (t.shape or (1,))[-1]
        row_bytes = quant.row_bytes(cols)
        rows = t.nbytes // row_bytes
        part = Extent(self.path, t.offset, rows, row_bytes, row_bytes, self.stamp)
        return Weight(name, (rows, cols), quant, (part,))


def not_computed_with(path: str, name: str, dtype: str) -> ModelFileError:
    """A tensor's numbers are of a type that is no type of weights."""
    return ModelFileError(
        path,
        f"the tensor {shown(name)} is {dtype}; hetrun computes with {', '.join(_FLOATS)}: "
        "get the model in one of them, or as GGUF",
    )


def read_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile:
    """Read and check the header of a safetensors file; ModelFileError says what is wrong with it."""
    with open_cursor(path, 8 + MAX_HEADER) as cursor:
        header = _read_header(cursor)
        tensors: dict[str, TensorLocation] = {}
        for name in list(header):
            tensors[name] = _read_tensor(cursor, name, header.pop(name))
        _check_extents(cursor, tensors)
        return SafetensorsFile(cursor.path, cursor.stamp, tensors)


def _read_header(cursor: Cursor) -> dict[str, object]:
    """The tensors' entries by name; the cursor stands behind them."""
    start = cursor.take(min(cursor.size, 24), "the beginning")
    reason = mistaken(start) or ("it is a GGUF file" if start.startswith(b"GGUF") else None)
    if reason and start[8:9] != b"{":  # "<" is a length too
        raise ModelFileError(cursor.path, f"is not a safetensors file: {reason}")
    cursor.pos, cursor.where = 0, "the header"
    length = cursor.number(U64, "its length")
    if not 2 <= length <= MAX_HEADER:
        cursor.fail(f"it is {length} bytes long, it must be 2 to {MAX_HEADER}: {DAMAGED}", 0)
    cursor.need(length, "its JSON")
    if start[8:9] != b"{":
        cursor.fail(f"it begins with {start[8:12]!r}, not with a brace: {DAMAGED}", 8)
    try:
        header = parse_object(cursor.take(length, "its JSON"), _made)
    except ValueError as e:
        cursor.fail(f"it is not a JSON object: {fault_in_json(e)}; {DAMAGED}", 8)
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
        cursor.fail("__metadata__ must be a table of texts", 8)
    return header


class _Entry(NamedTuple):
    """What the header says of a tensor, unchecked. There may be very many: tuples take a third of tables."""

    dtype: object
    shape: object
    offsets: object

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> _Entry:
        """The fields of a table, None where it lacks one."""
        dtype, shape, offsets = map(table.get, _FIELDS)
        return cls(sys.intern(dtype) if isinstance(dtype, str) else dtype, _frozen(shape), _frozen(offsets))


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _made(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any] | _Entry:
    """The objects of the header, as they are parsed."""
    found = once(pairs)
    is_entry = found.keys() == {*_FIELDS} and isinstance(found["dtype"], str)
    return _Entry.of(found) if is_entry else found


def _read_tensor(cursor: Cursor, name: str, entry: object) -> TensorLocation:
    if isinstance(entry, dict):
        entry = _Entry.of(entry)
    if not isinstance(entry, _Entry):
        _fail(cursor, name, "it must be a table with dtype, shape and data_offsets")
    dtype, shape, offsets = entry
    if not isinstance(dtype, str) or dtype not in _BITS:
        _fail(cursor, name, f"its dtype {shown(str(dtype))} is not one that hetrun knows: it is newer than "
              "this hetrun, or the file is damaged")  # fmt: skip
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        _fail(cursor, name, f"its shape {_said(shape)} must be up to {MAX_DIMS} whole numbers: {DAMAGED}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(cursor, name, f"its data_offsets {_said(offsets)} must be where it begins and ends: {DAMAGED}")
    begin, end = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits != 8 * (end - begin):
        _fail(cursor, name, f"{dtype} of the shape {_said(shape)} takes {-(-bits // 8)} bytes, "
              f"but its data_offsets leave {end - begin}: {DAMAGED}")  # fmt: skip
    return TensorLocation(name, dtype, shape, cursor.pos + begin, end - begin)


def _fail(cursor: Cursor, name: str, reason: str) -> NoReturn:
    cursor.where = f"tensor {shown(name)}"
    cursor.fail(reason, 8)


def _are_sizes(value: object) -> TypeGuard[tuple[int, ...]]:
    """Whether they are whole numbers, none below 0 or beyond what a file can have."""
    if not isinstance(value, tuple) or not {*map(type, value)} <= {int}:
        return False
    return not value or (min(value) >= 0 and max(value) < 1 << 63)


def _said(value: object) -> str:
    return shown(str([*value] if isinstance(value, tuple) else value))


def _check_extents(cursor: Cursor, tensors: Mapping[str, TensorLocation]) -> None:
    """The tensors follow each other from the header's end to the file's, as the format demands."""
    end, before = cursor.pos, None
    for t in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        last = t.offset + t.nbytes
        if last > cursor.size:
            raise ModelFileError(
                cursor.path,
                f"the file is {cursor.size} bytes but tensor {shown(t.name)} needs bytes {t.offset}..{last}: "
                "it is truncated, download it again",
            )
        if t.offset < end:
            other = f"tensor {shown(before)}" if before is not None else "the header"
            shared = f"{t.offset}..{min(end, last)}: {DAMAGED}"
            raise ModelFileError(cursor.path, f"{other} and tensor {shown(t.name)} share bytes {shared}")
        if t.offset > end:
            raise ModelFileError(cursor.path, f"no tensor has the bytes {end}..{t.offset}: {DAMAGED}")
        end, before = last, t.name
    if end < cursor.size:
        raise ModelFileError(cursor.path, f"no tensor has the bytes {end}..{cursor.size}: {DAMAGED}")
