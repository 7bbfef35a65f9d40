"""Reading a stranger's file front to back, with every length checked before it is believed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct, error as StructError
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hetrun.errors import ModelFileError
from hetrun.system.file_identity import Stamp
from hetrun.system.files import NotAFile, open_regular

DAMAGED = "the file is damaged, download it again"
U32, U64 = Struct("<I"), Struct("<Q")

_WINDOW = 1 << 20

# What people have in hand when it is not a model file, by its first bytes.
_MISTAKEN = (
    (b"version https://git-lfs", "it is a Git LFS pointer, not the model: run `git lfs pull`"),
    (b"<", "it looks like a web page: something answered the download with a page instead"),
    (b"PK\x03\x04", "it is a zip or PyTorch archive"),
)


def mistaken(start: bytes) -> str | None:
    """What a file with this beginning is, where people take it for a model."""
    return next((reason for magic, reason in _MISTAKEN if start.startswith(magic)), None)


@contextmanager
def open_cursor(path: str | os.PathLike[str], limit: int) -> Iterator[Cursor]:
    """A cursor over the first `limit` bytes of a file; what the system refuses becomes ModelFileError."""
    name = os.fspath(path)
    try:
        fd = open_regular(name)
    except OSError as error:
        raise ModelFileError(name, _cannot_open(error)) from error
    try:
        status = os.fstat(fd)
        if status.st_size == 0:
            raise ModelFileError(name, "is empty: download it again")
        yield Cursor(fd, name, Stamp.of(status), limit)
    except OSError as error:
        raise ModelFileError(name, f"cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


class Cursor:
    """Reads a header through one window; refuses what would lie behind the file's end or behind the limit."""

    def __init__(self, fd: int, path: str, stamp: Stamp, limit: int) -> None:
        self.path = path
        self.stamp = stamp
        self.size = stamp.size
        self.limit = min(self.size, limit)
        self.pos = 0
        self.where = "the beginning"
        self._fd = fd
        self._window = b""
        self._base = 0

    def fail(self, reason: str, at: int | None = None) -> NoReturn:
        """Refuse the file: where in it, and why."""
        raise ModelFileError(self.path, f"{self.where}, at byte {self.pos if at is None else at}: {reason}")

    def need(self, count: int, what: str) -> None:
        """Refuse the file unless this many more bytes can be in its header."""
        if count <= self.limit - self.pos:
            return
        if count <= self.size - self.pos:
            self.fail(f"{what} needs {count} bytes; hetrun reads up to {self.limit} there")
        self.fail(f"{what} needs {count} bytes, but the file ends after {self.size - self.pos}: {DAMAGED}")

    def take(self, count: int, what: str) -> bytes:
        """The next bytes."""
        if count > _WINDOW:  # through the window they would be held twice
            self.need(count, what)
            data = self._read(count)
            self.pos += count
            return data
        start = self._seek(count, what)
        self.pos += count
        return self._window[start : start + count]

    def number(self, struct: Struct, what: str) -> Any:  # noqa: ANN401 - the struct knows what it holds
        """The next number."""
        start = self._seek(struct.size, what)
        self.pos += struct.size
        return struct.unpack_from(self._window, start)[0]

    def strings(self, count: int) -> tuple[bytes, npt.NDArray[np.int64]]:
        """The next strings, each behind eight bytes of length: their bytes, where each begins, and the end.

        One pass over the lengths finds where they end; then their bytes are read in one piece of that size.
        """
        begin, unpack, left = self.pos, U64.unpack_from, count
        found = []
        while left:
            self._seek(8, f"string {count - left} of {count}")
            window, at, starts = self._window, self.pos - self._base, []
            try:
                for _ in range(left):
                    length = unpack(window, at)[0]
                    starts.append(at)
                    at += 8 + length
            except (StructError, OverflowError):
                pass  # the next length lies behind the window, or behind all that can be addressed
            left -= len(starts)
            found.append(np.array(starts, np.int64) + (self._base - begin))
            end = self._base + at
            if end > self.limit:  # only the last string found can reach that far
                self.pos = self._base + starts[-1]
                self.need(end - self.pos, f"string {count - left - 1} of {count}")
            self.pos = end
        end, self.pos = self.pos, begin
        return self.take(end - begin, "its strings"), np.concatenate([*found, [end - begin]], dtype=np.int64)

    def _seek(self, count: int, what: str) -> int:
        """Have the next bytes in the window; where in it they start."""
        start = self.pos - self._base
        if start < 0 or start + count > len(self._window):
            self.need(count, what)
            self._window = self._read(max(count, min(_WINDOW, self.limit - self.pos)))
            self._base = self.pos
            start = 0
        return start

    def _read(self, count: int) -> bytes:
        data = os.pread(self._fd, count, self.pos)
        if len(data) < count:
            self.fail("the file became shorter while it was read: is it still being downloaded?")
        return data


def _cannot_open(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, PermissionError):
        return "may not be read: check its permissions"
    return f"{error.strerror}" if isinstance(error, NotAFile) else f"cannot be opened: {error.strerror}"
