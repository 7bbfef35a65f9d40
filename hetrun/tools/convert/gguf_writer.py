"""Writes GGUF version 3: a header with every offset computed before, then tensors in order, all or nothing.

docs/adr/0011-conversion.md says why.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from itertools import groupby
from math import prod
from pathlib import Path
from shutil import disk_usage
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hetrun.errors import OptionError
from hetrun.graph.quant import Bytes, QuantType
from hetrun.system.files import sync_folder

ALIGNMENT = 32  # of a file that does not say another
ALIGNMENT_KEY = "general.alignment"
ASK_BYTES = 64 << 20  # written before the disk is asked to begin

Numbers: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value with its type in front, as it stands in another file."""

    raw: bytes


MetaValue: TypeAlias = bool | int | float | str | Numbers | Sequence[str] | Sequence[bytes] | StoredValue
Metadata: TypeAlias = Mapping[str, MetaValue]

_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64, _I64 = 4, 5, 6, 7, 8, 9, 10, 11
_NUMBER_TYPES = {
    "|u1": 0, "|i1": 1, "<u2": 2, "<i2": 3, "<u4": 4, "<i4": 5,
    "<f4": 6, "|b1": 7, "<u8": 10, "<i8": 11, "<f8": 12,
}  # fmt: skip


class TableEntry(Protocol):
    """What the table of tensors says of one: of a file to be, or of one that is there."""

    @property
    def name(self) -> str:
        """Up to 64 bytes."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""
        ...

    @property
    def ggml_id(self) -> int:
        """ggml's number of its type."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes without the padding behind it."""
        ...


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the file to be: `shape` rows first, as numpy has it."""

    name: str
    shape: tuple[int, ...]
    quant: QuantType

    @property
    def ggml_id(self) -> int:
        """ggml's number of its type."""
        return self.quant.ggml_id

    @property
    def nbytes(self) -> int:
        """Bytes without the padding behind it."""
        return prod(self.shape[:-1]) * self.quant.row_bytes(self.shape[-1])


def header(metadata: Metadata, tensors: Sequence[TableEntry]) -> list[bytes]:
    """Everything before the first tensor's bytes, in pieces."""
    alignment, offset = alignment_of(metadata), 0
    out = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        out += [_text(key), *_value(value)]
    for t in tensors:
        dims = t.shape[::-1]
        out.append(_text(t.name))
        out.append(struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, t.ggml_id, offset))
        offset += padded(t.nbytes, alignment)
    size = sum(map(len, out))
    return [*out, bytes(padded(size, alignment) - size)]


def size_of(header: Sequence[bytes], tensors: Sequence[TableEntry], alignment: int) -> int:
    """Of the whole file."""
    return sum(map(len, header)) + sum(padded(t.nbytes, alignment) for t in tensors)


def alignment_of(metadata: Metadata) -> int:
    """What the beginning of each tensor is a multiple of."""
    value = metadata.get(ALIGNMENT_KEY, ALIGNMENT)
    assert isinstance(value, int)
    return value


def padded(size: int, alignment: int = ALIGNMENT) -> int:
    """Where the next thing begins."""
    return -(-size // alignment) * alignment


def _text(text: str | bytes) -> bytes:
    # Tokens may be any bytes: what was not UTF-8 in a file was read as surrogates.
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: MetaValue) -> Iterator[bytes]:
    """Its type and itself. llama.cpp wants whole numbers as uint32 and others as float32."""
    if isinstance(value, StoredValue):
        yield value.raw
    elif isinstance(value, str):
        yield struct.pack("<I", _STRING) + _text(value)
    elif isinstance(value, bool):
        yield struct.pack("<I?", _BOOL, value)
    elif isinstance(value, int):
        yield _whole(value)
    elif isinstance(value, float):
        yield struct.pack("<If", _F32, value)
    elif isinstance(value, np.ndarray):
        yield struct.pack("<IIQ", _ARRAY, _NUMBER_TYPES[value.dtype.str], len(value)) + value.tobytes()
    else:
        yield struct.pack("<IIQ", _ARRAY, _STRING, len(value))
        yield b"".join(_text(item) for item in value)


def _whole(value: int) -> bytes:
    if 0 <= value < 1 << 32:
        return struct.pack("<II", _U32, value)
    if -(1 << 31) <= value < 0:
        return struct.pack("<Ii", _I32, value)
    return struct.pack("<Iq", _I64, value) if value < 0 else struct.pack("<IQ", _U64, value)


class GgufOutput:
    """A file that is written from front to back."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._asked = 0
        self.size = 0

    def write(self, data: bytes | Bytes) -> None:
        """Add bytes."""
        view = memoryview(data if isinstance(data, bytes) else data.data).cast("B")
        while len(view):
            n = os.write(self._file, view)
            self.size += n
            view = view[n:]
        if self.size - self._asked >= ASK_BYTES:
            # Makes the disk begin with these pages, and does not wait: the end has less to wait for then.
            os.posix_fadvise(self._file, self._asked, self.size - self._asked, os.POSIX_FADV_DONTNEED)
            self._asked = self.size

    def pad(self, alignment: int) -> None:
        """Go to where the next tensor begins."""
        self.write(bytes(padded(self.size, alignment) - self.size))


@contextmanager
def _new_file(path: Path, size: int, force: bool) -> Iterator[GgufOutput]:
    """A file of `size` bytes that gets its name when it is complete; a failure leaves nothing behind, and
    what a kill has left is removed."""
    _remove_killed(path)
    partial, ours = path.with_name(f".{path.name}.{os.getpid()}.part"), True
    try:
        try:
            file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            ours = False
            raise
        try:
            with suppress(OSError):  # where there are no locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            output = GgufOutput(file)
            yield output
            assert output.size == size, f"{output.size} bytes instead of {size}"
            os.fsync(file)
        finally:
            os.close(file)
        check_target(path, force)
        os.replace(partial, path)
    finally:  # Ctrl-C may come as soon as the file is there
        if ours:
            partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def _remove_killed(path: Path) -> None:
    """Parts of a file of this name that no process writes any more: theirs are locked."""
    for partial in path.parent.glob(f".{escape(path.name)}.*.part"):
        with suppress(OSError):
            file = os.open(partial, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                partial.unlink()
            finally:
                os.close(file)


def target_path(output: Path | None, default: str) -> Path:
    """Where a new file goes: `output` may be a folder for it, or nothing."""
    if output is None:
        return Path(default)
    return output / default if os.path.isdir(output) else output


def check_target(path: Path, force: bool) -> None:
    """Refuse what a new file cannot or must not replace."""
    if os.path.isdir(path):
        raise OptionError(f"{path} is a folder; name a file with -o")
    if os.path.exists(path) and not os.path.isfile(path):
        raise OptionError(
            f"{path} is a device or a pipe, which cannot be replaced by a file; name a file with -o"
        )
    if os.path.lexists(path) and not force:
        raise OptionError(f"{path} exists already; --force replaces it, -o writes to another file")
    if not os.path.isdir(path.parent):
        raise OptionError(f"{path.parent} is not a folder: create it, or write elsewhere with -o")


def write_model(
    path: Path,
    metadata: Metadata,
    tensors: Sequence[TableEntry],
    pieces: Iterable[tuple[int, Bytes]],
    force: bool = False,
) -> int:
    """Write a model and return its size.

    `pieces` are the bytes of the tensors in order, cut as one likes, each with its tensor's index.
    """
    check_target(path, force)
    start, alignment = header(metadata, tensors), alignment_of(metadata)
    total = size_of(start, tensors, alignment)
    free = disk_usage(path.parent).free
    if total > free:
        raise OptionError(f"{path}: needs {total:,} bytes, but only {free:,} are free there; choose with -o")
    try:
        with _new_file(path, total, force) as output:
            for part in start:
                output.write(part)
            for _, group in groupby(pieces, lambda piece: piece[0]):
                for _, piece in group:
                    output.write(piece)
                output.pad(alignment)
    except OSError as e:
        raise OptionError(f"{path}: {total:,} bytes cannot be written there: {e.strerror}") from e
    return total
