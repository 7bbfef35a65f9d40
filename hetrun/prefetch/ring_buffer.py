"""The ring of pieces that C threads read from disk ahead of a pass: the library ring_reader.c, for Python."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_int, c_int64, c_size_t, c_ssize_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import BackendError
from hetrun.prefetch.native import CFile, OpenFile, ReadFunction, file_table
from hetrun.system.native_library import Prototypes, address_of, load_built

NAME = "ring_reader.so"  # beside this file
VERSION = 2  # of its structures
PAGE = 4096  # of which positions, lengths and memory of direct reads are multiples
BOUNCE = 1 << 20  # bytes that longer reads of any position go through
MOST_EXTENTS = 4  # of a piece
ENDED, MISTAKE = 0, -1  # faults that are no errors of the system

EXTENT = np.dtype([(name, np.int64) for name in ("file", "offset", "bytes", "at", "to")])
PIECE = np.dtype([("count", np.int64), ("extents", EXTENT, MOST_EXTENTS)])

# As pread; errors are told by errno.
READING = CFUNCTYPE(c_ssize_t, c_int, c_void_p, c_size_t, c_int64, use_errno=True)


class _Extent(Structure):
    """struct extent."""

    _fields_ = tuple((name, c_int64) for name in ("file", "offset", "bytes", "at", "to"))


class _RingSetup(Structure):
    """struct setup."""

    _fields_ = (
        *((name, c_int64) for name in ("slots", "slot_bytes", "threads", "synchronous", "files")),
        ("file", POINTER(CFile)),
        ("read", c_void_p),
    )


class ReadFault(Structure):
    """struct fault: the byte of a file that could not be read; of a mistake, the rank instead of the byte."""

    _fields_ = (("error", c_int64), ("file", c_int64), ("offset", c_int64))
    error: int
    file: int
    offset: int


class RingCounts(Structure):
    """struct counts: what was read, and how long a thread waited for it, in nanoseconds."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("bytes", "reads", "waited", "stalled"),
            *("lap_bytes", "lap_waited", "lap_stalled", "missing"),
        )
    )
    bytes: int
    reads: int
    waited: int
    stalled: int
    lap_bytes: int
    lap_waited: int
    lap_stalled: int
    missing: int


FUNCTIONS: Prototypes = {
    "hetrun_ring_open": (c_void_p, POINTER(_RingSetup)),
    "hetrun_ring_supply": (c_void_p, c_void_p),
    "hetrun_ring_follow": (c_int, c_void_p, c_void_p, c_int64, c_int64),
    "hetrun_ring_begin": (c_int, c_void_p, c_int64, c_int64),
    "hetrun_ring_wait": (c_void_p, c_void_p, c_int64),
    "hetrun_ring_release": (None, c_void_p, c_int64),
    "hetrun_ring_stop": (None, c_void_p),
    "hetrun_ring_restart": (None, c_void_p),
    "hetrun_ring_fault": (c_int, c_void_p, POINTER(ReadFault)),
    "hetrun_ring_counts": (None, c_void_p, POINTER(RingCounts)),
    "hetrun_ring_fetch": (c_int, c_void_p, POINTER(_Extent), c_void_p, POINTER(ReadFault)),
    "hetrun_ring_close": (None, c_void_p),
}


@cache
def library() -> ctypes.CDLL | None:
    """The library, if it can be used here."""
    return load_built(Path(__file__).parent / NAME, ("hetrun_ring_version", VERSION), FUNCTIONS)


@dataclass(frozen=True, slots=True)
class RingShape:
    """How large a ring is and who fills it. A synchronous one has no readers: the thread that waits for a
    piece reads it."""

    slots: int
    slot_bytes: int  # a multiple of a page
    threads: int
    synchronous: bool = False

    @property
    def nbytes(self) -> int:
        """Memory that the ring holds."""
        return self.slots * self.slot_bytes + BOUNCE


class RingBuffer:
    """Pieces of files, read round and round in the order of a schedule.

    A lap is one pass through the schedule. All but `stop` belongs to one thread, which begins laps, while
    runners take pieces through the supply (supply.h). The files stay the caller's, who closes them later.
    """

    def __init__(self, files: Sequence[OpenFile], shape: RingShape, read: ReadFunction | None = None) -> None:
        """`read` takes the place of pread."""
        found = library()
        if found is None:
            raise OSError("the library ring_reader.c was not built")
        self.shape = shape
        self._dll = found
        self._read = read  # it has to live as long as the ring
        table = file_table(files)
        setup = _RingSetup(shape.slots, shape.slot_bytes, shape.threads, shape.synchronous, len(files), table)
        setup.read = address_of(read)
        self._closing = threading.Lock()
        self._ring: int | None = found.hetrun_ring_open(byref(setup))
        if not self._ring:
            raise OSError(ctypes.get_errno(), f"no ring of {shape.nbytes} bytes and {shape.threads} threads")

    @property
    def address(self) -> int:
        """Of the `struct supply`."""
        address: int = self._dll.hetrun_ring_supply(self._ring)
        return address

    def follow(self, schedule: NDArray[np.void], always: int) -> None:
        """Read these pieces (of type PIECE) from the next lap on, as many as `always` for every lap."""
        schedule = np.ascontiguousarray(schedule, PIECE)
        self._check(self._dll.hetrun_ring_follow(self._ring, schedule.ctypes.data, len(schedule), always))

    def begin(self, wanted: bool, without: int = 0) -> None:
        """A lap begins, which the one before must have come to its end for; the last `without` pieces are not
        taken."""
        self._check(self._dll.hetrun_ring_begin(self._ring, wanted, without))

    def wait(self, rank: int) -> int | None:
        """The address of a piece of the lap, as the supply gives it."""
        address: int | None = self._dll.hetrun_ring_wait(self._ring, rank)
        return address

    def release(self, rank: int) -> None:
        """The piece is not in use any more."""
        self._dll.hetrun_ring_release(self._ring, rank)

    def _check(self, error: int) -> None:
        if error == errno.EBUSY:
            raise BackendError(f"{self.counts().missing} pieces of the previous pass were not used")
        if error:
            raise OSError(error, os.strerror(error))

    def stop(self) -> None:
        """Threads that wait get nothing any more, until a restart; from any thread."""
        with self._closing:
            if self._ring:
                self._dll.hetrun_ring_stop(self._ring)

    def restart(self) -> None:
        """Forget the lap, whatever became of it; no runner is at work any more."""
        self._dll.hetrun_ring_restart(self._ring)

    def fault(self) -> ReadFault | None:
        """Why pieces do not come, if something failed."""
        fault = ReadFault()
        return fault if self._dll.hetrun_ring_fault(self._ring, byref(fault)) else None

    def counts(self) -> RingCounts:
        """What was read so far."""
        counts = RingCounts()
        self._dll.hetrun_ring_counts(self._ring, byref(counts))
        return counts

    def fetch(self, file: int, offset: int, out: NDArray[np.uint8]) -> ReadFault | None:
        """Bytes of a file, now; a fault, if there was one, does not end a lap."""
        wanted, fault = _Extent(file, offset, out.nbytes), ReadFault()
        bad = self._dll.hetrun_ring_fetch(self._ring, byref(wanted), out.ctypes.data, byref(fault))
        return fault if bad else None

    def close(self) -> None:
        """Readers end, and the memory is given back; no runner is at work any more."""
        with self._closing:
            ring, self._ring = self._ring, None
            if ring:
                self._dll.hetrun_ring_close(ring)
