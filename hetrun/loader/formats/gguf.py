"""A bounded reader of GGUF headers, versions 2 and 3, little-endian.

Files come from strangers. Every count, length and offset is checked against what the file can still hold
before anything is read or allocated for it, so a bad file costs a sentence and never memory, time or a crash.
Only the header is read: tensors come back as extents of the file. docs/adr/0006-own-gguf-reader.md says why.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from struct import Struct

import numpy as np

from hetrun.errors import ModelFileError
from hetrun.graph.quant import OTHER_TYPES, QUANTS, QuantType
from hetrun.loader.formats.bounded_reader import DAMAGED, U32, U64, Cursor, mistaken, open_cursor
from hetrun.loader.formats.gguf_file import GGUFFile, Numbers, StringArray, TensorInfo, Value, shown
from hetrun.loader.formats.gguf_split import join_parts

__all__ = ["GGUFFile", "StringArray", "TensorInfo", "Value", "read_gguf"]

# What no real file comes near; these bound the time and memory a hostile one can take. The largest
# vocabularies have about a million strings, the largest models some ten thousand tensors, or a hundred
# thousand where each expert has its own, the largest headers some 50 MiB.
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ITEMS = 1 << 24
MAX_HEADER = 256 << 20
MAX_ALIGNMENT = 1 << 16
# These are the format's own.
MAX_KEY = 65535
MAX_NAME = 64
MAX_DIMS = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: dict[int, tuple[Struct, str]] = {
    0: (Struct("<B"), "<u1"),
    1: (Struct("<b"), "<i1"),
    2: (Struct("<H"), "<u2"),
    3: (Struct("<h"), "<i2"),
    4: (U32, "<u4"),
    5: (Struct("<i"), "<i4"),
    6: (Struct("<f"), "<f4"),
    7: (Struct("<B"), "<u1"),
    10: (U64, "<u8"),
    11: (Struct("<q"), "<i8"),
    12: (Struct("<d"), "<f8"),
}
# The fewest bytes an entry can have: one letter of name, and a one-byte value or one dimension.
_LEAST_PAIR = 8 + 1 + 4 + 1
_LEAST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8

_QUANT_BY_ID = {quant.ggml_id: quant for quant in QUANTS.values()}

# The formats before GGUF, by their first bytes.
_OLDER = {b"lmgg": "GGML", b"tjgg": "GGJT", b"fmgg": "GGMF"}


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read and check the header of a GGUF file, or of all parts of a split model.

    ModelFileError says what is wrong with it.
    """
    return join_parts(_read_part(path), _read_part)


def _read_part(path: str | os.PathLike[str]) -> GGUFFile:
    with open_cursor(path, MAX_HEADER) as cursor:
        return _read_header(cursor)


def _read_header(cursor: Cursor) -> GGUFFile:
    version = _read_version(cursor)
    n_tensors = cursor.number(U64, "the number of tensors")
    n_pairs = cursor.number(U64, "the number of metadata pairs")
    for count, most, least, what, at in (
        (n_tensors, MAX_TENSORS, _LEAST_TENSOR, "tensors", 8),
        (n_pairs, MAX_PAIRS, _LEAST_PAIR, "metadata pairs", 16),
    ):
        if count > most:
            cursor.fail(f"{count} {what}, hetrun reads up to {most}: {DAMAGED}", at)
        cursor.need(count * least, f"a table of {count} {what}")
    metadata: dict[str, Value] = {}
    spans: dict[str, tuple[int, int]] = {}
    alignment = 32
    for index in range(n_pairs):
        begin = cursor.pos + 8  # behind the length of its key
        key, kind, value = _read_pair(cursor, index)
        if key in metadata:
            cursor.fail("the key appears twice")
        if key == "general.alignment":
            alignment = _check_alignment(cursor, kind, value)
        metadata[key] = value
        spans[key] = begin + len(key.encode()), cursor.pos
    tensors = _read_tensors(cursor, n_tensors, alignment)
    start = -(-cursor.pos // alignment) * alignment
    placed = {name: replace(t, offset=start + t.offset) for name, t in tensors.items()}
    _check_extents(cursor, placed)
    stamps = {cursor.path: cursor.stamp}
    return GGUFFile(cursor.path, version, cursor.size, alignment, start, metadata, placed, stamps, spans)


def _shown(start: bytes) -> str:
    """Bytes as text where they are one, else as numbers."""
    text = start.decode("ascii", "replace")
    return repr(text) if text.isascii() and text.isprintable() else f"the bytes {start.hex(' ')}"


def _read_version(cursor: Cursor) -> int:
    start = cursor.take(min(cursor.size, 24), "the beginning")
    if start[:4] != b"GGUF":
        if reason := mistaken(start):
            raise ModelFileError(cursor.path, f"is not a GGUF file: {reason}")
        if older := _OLDER.get(start[:4]):
            reason = f"it is {older}, the format before GGUF: get a GGUF of the model"
            raise ModelFileError(cursor.path, f"is not a GGUF file: {reason}")
        if start[8:10] in (b'{"', b"{ ") and start[6:8] == b"\0\0":
            raise ModelFileError(cursor.path, "is not a GGUF file: it is a safetensors file")
        raise ModelFileError(
            cursor.path, f"is not a GGUF file: it begins with {_shown(start[:4])}, not 'GGUF'"
        )
    cursor.pos = 4
    cursor.where = "the header"
    version: int = cursor.number(U32, "the version")
    if version and version & 0xFFFF == 0:
        cursor.fail("the file is big-endian, hetrun reads little-endian ones: convert the model again", 4)
    if version == 1:
        cursor.fail("GGUF version 1 is too old: convert the model again, or download a newer file", 4)
    if version not in (2, 3):
        cursor.fail(f"GGUF version {version} is not known: hetrun reads 2 and 3", 4)
    return version


def _check_alignment(cursor: Cursor, kind: int, value: Value) -> int:
    if kind != 4 or not isinstance(value, int):
        cursor.fail("the alignment must be a uint32")
    if not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        cursor.fail(f"the alignment is {value}, it must be a power of two up to {MAX_ALIGNMENT}")
    return value


def _read_name(cursor: Cursor, most: int, what: str) -> str:
    length = cursor.number(U64, f"the length of {what}")
    if not 1 <= length <= most:
        cursor.fail(f"{what} is {length} bytes long, it must be 1 to {most}: {DAMAGED}", cursor.pos - 8)
    raw = cursor.take(length, what)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        cursor.fail(f"{what} is not UTF-8: {raw[:40]!r}", cursor.pos - length)


def _read_pair(cursor: Cursor, index: int) -> tuple[str, int, Value]:
    cursor.where = f"metadata pair {index}"
    key = _read_name(cursor, MAX_KEY, "its key")
    cursor.where = f"metadata key {shown(key)}"
    kind = cursor.number(U32, "its type")
    if kind == _ARRAY:
        return key, kind, _read_array(cursor)
    if kind == _STRING:
        length = cursor.number(U64, "the length of its text")
        # Only shown or compared, so what is not UTF-8 is marked instead of refused.
        return key, kind, cursor.take(length, "its text").decode("utf-8", "replace")
    if kind not in _NUMBERS:
        cursor.fail(f"its type is {kind}, which GGUF does not have: {DAMAGED}", cursor.pos - 4)
    value: int | float = cursor.number(_NUMBERS[kind][0], "its value")
    if kind != _BOOL:
        return key, kind, value
    if value not in (0, 1):
        cursor.fail(f"it is a boolean and holds {value}, not 0 or 1: {DAMAGED}", cursor.pos - 1)
    return key, kind, value == 1


def _read_array(cursor: Cursor) -> Numbers | StringArray:
    kind = cursor.number(U32, "the type of its elements")
    if kind == _ARRAY:
        # The format allows them; no program writes them, and llama.cpp refuses them too.
        cursor.fail("arrays within arrays are not supported", cursor.pos - 4)
    if kind != _STRING and kind not in _NUMBERS:
        cursor.fail(f"its elements are of type {kind}, which GGUF does not have: {DAMAGED}", cursor.pos - 4)
    count = cursor.number(U64, "the number of its elements")
    least = 8 if kind == _STRING else _NUMBERS[kind][0].size
    cursor.need(count * least, f"an array of {count} elements")
    if count > MAX_ITEMS:
        cursor.fail(f"it has {count} elements, hetrun reads up to {MAX_ITEMS}", cursor.pos - 8)
    if kind == _STRING:
        return StringArray(*cursor.strings(count))
    numbers: Numbers = np.frombuffer(cursor.take(count * least, "its elements"), _NUMBERS[kind][1])
    if kind != _BOOL:
        return numbers
    if count and numbers.max() > 1:
        cursor.fail(f"it holds booleans that are neither 0 nor 1: {DAMAGED}", cursor.pos - count)
    return numbers.view(np.bool_)


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """The table; offsets still count from the start of the data."""
    tensors: dict[str, TensorInfo] = {}
    for index in range(count):
        cursor.where = f"tensor {index}"
        tensor = _read_tensor(cursor, alignment)
        if tensor.name in tensors:
            cursor.fail("the name appears twice")
        tensors[tensor.name] = tensor
    return tensors


def _read_tensor(cursor: Cursor, alignment: int) -> TensorInfo:
    """One entry of the table; its offset still counts from the start of the data."""
    name = _read_name(cursor, MAX_NAME, "its name")
    cursor.where = f"tensor {shown(name)}"
    n_dims = cursor.number(U32, "the number of its dimensions")
    if not 1 <= n_dims <= MAX_DIMS:
        cursor.fail(f"it has {n_dims} dimensions, ggml has 1 to {MAX_DIMS}: {DAMAGED}", cursor.pos - 4)
    dims = [cursor.number(U64, "a dimension") for _ in range(n_dims)]
    weights = math.prod(dims)
    if not 1 <= weights < 1 << 63:
        cursor.fail(f"its dimensions {dims} cannot be a tensor's: {DAMAGED}", cursor.pos - 8 * n_dims)
    quant, block, block_bytes = _read_type(cursor)
    if dims[0] % block:
        label = quant if isinstance(quant, str) else quant.name
        cursor.fail(f"its rows of {dims[0]} weights are not whole {label} blocks of {block}: {DAMAGED}")
    offset = cursor.number(U64, "its offset")
    if offset % alignment:
        cursor.fail(f"its offset {offset} is not a multiple of the alignment {alignment}", cursor.pos - 8)
    nbytes = weights // block * block_bytes
    return TensorInfo(name, tuple(reversed(dims)), quant, offset, nbytes, cursor.path, cursor.stamp)


def _read_type(cursor: Cursor) -> tuple[QuantType | str, int, int]:
    number = cursor.number(U32, "its type")
    if (quant := _QUANT_BY_ID.get(number)) is not None:
        return quant, quant.block, quant.block_bytes
    if (other := OTHER_TYPES.get(number)) is not None:
        return other
    cursor.fail(
        f"its type is {number}, which hetrun does not know: it is older than 2024 or newer than this hetrun, "
        "or the file is damaged",
        cursor.pos - 4,
    )


def _check_extents(cursor: Cursor, tensors: Mapping[str, TensorInfo]) -> None:
    """Every tensor lies within the file, and no two share a byte."""
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        name, last = shown(tensor.name), tensor.offset + tensor.nbytes
        if last > cursor.size:
            raise ModelFileError(
                cursor.path,
                f"the file is {cursor.size} bytes but tensor {name} needs bytes {tensor.offset}..{last}: "
                "it is truncated, download it again",
            )
        if tensor.offset < end:
            raise ModelFileError(
                cursor.path,
                f"tensors {before} and {name} share bytes {tensor.offset}..{min(end, last)}: {DAMAGED}",
            )
        end, before = last, name
