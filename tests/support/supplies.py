"""Takes pieces as C code does, through a `struct supply` (supply.h); and a disk that fails."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int, c_int64, c_void_p

import numpy as np
from numpy.typing import NDArray

from hetrun.prefetch.ring_buffer import READING


class _Supply(ctypes.Structure):
    _fields_ = (
        ("ring", c_void_p),
        ("wait", CFUNCTYPE(c_void_p, c_void_p, c_int64)),
        ("release", CFUNCTYPE(None, c_void_p, c_int64)),
        ("read", CFUNCTYPE(c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
    )


class Taker:
    """A runner's side of a supply."""

    def __init__(self, address: int) -> None:
        self._supply = _Supply.from_address(address)

    def wait(self, rank: int) -> int | None:
        """The address of a piece."""
        address: int | None = self._supply.wait(self._supply.ring, rank)
        return address

    def release(self, rank: int) -> None:
        self._supply.release(self._supply.ring, rank)

    def bytes_of(self, rank: int, start: int, nbytes: int) -> bytes | None:
        """Wait, look, and keep the piece."""
        address = self.wait(rank)
        return None if address is None else ctypes.string_at(address + start, nbytes)

    def take(self, rank: int, start: int, nbytes: int) -> bytes | None:
        """Wait, look, release."""
        found = self.bytes_of(rank, start, nbytes)
        if found is not None:
            self.release(rank)
        return found

    def read(self, file: int, offset: int, nbytes: int) -> bytes | None:
        """A row of a table."""
        out: NDArray[np.uint8] = np.zeros(nbytes, np.uint8)
        bad = self._supply.read(self._supply.ring, file, offset, nbytes, out.ctypes.data)
        return None if bad else out.tobytes()


class Disk:
    """Stands for pread, with files that are bytes; `before` may fail or wait for each read.

    `before` gets the number of the read, and returns how many bytes it may give at most, or minus an error.
    """

    def __init__(self, *files: bytes, before: Callable[[int], int] | None = None) -> None:
        self.files = files
        self.before = before
        self.reads: list[tuple[int, int, int]] = []  # file, offset, bytes that were asked for
        self._lock = threading.Lock()
        self.function = READING(self._read)

    def _read(self, fd: int, to: int, nbytes: int, offset: int) -> int:
        with self._lock:
            number = len(self.reads)
            self.reads.append((fd, offset, nbytes))
        most = self.before(number) if self.before else nbytes
        if most < 0:
            ctypes.set_errno(-most)
            return -1
        found = self.files[fd][offset : offset + min(nbytes, most)]
        ctypes.memmove(to, found, len(found))
        return len(found)


def eventually(true: Callable[[], bool]) -> None:
    """What other threads are about to do has happened."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)
