"""Experts that come from disk when they are chosen, and stay as long as others are worth less: the library
expert_slots.c, for Python. Every pass checks that the files are still those whose headers were read."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import HetrunError
from hetrun.graph import Weight
from hetrun.prefetch.expert_records import Records
from hetrun.prefetch.native import ReadFunction, file_table
from hetrun.prefetch.open_files import OpenFiles
from hetrun.prefetch.ring_buffer import ReadFault
from hetrun.system.address_space import HUGE_PAGE, ReservedMemory
from hetrun.system.native_library import Prototypes, address_of, load_built

NAME = "expert_slots.so"  # beside this file
VERSION = 1  # of its structures
# The rules by which experts stay: tokens after which a choice counts for half; 0: only the last one counts.
HALF_LIVES = (0.0, 16.0, 64.0, 256.0, 1024.0)
FIRST_RULE = 2
TRACED = 1 << 18  # choices that are remembered, to compare what was kept with what could have been


class _ExpertKind(Structure):
    """struct kind."""

    _fields_ = (("memory", c_void_p), *((name, c_int64) for name in ("bytes", "count", "most")))


class _CacheSetup(Structure):
    """struct cache_setup."""

    _fields_ = (
        *(
            (name, c_int64)
            for name in (
                *("records", "mixtures", "kinds", "buffers", "buffer_bytes", "threads", "files", "trace"),
            )
        ),
        ("record", c_void_p),
        ("first", c_void_p),
        ("kind", c_void_p),
        ("file", c_void_p),
        ("half_lives", c_double * len(HALF_LIVES)),
        ("rule", c_int64),
        ("read", c_void_p),
    )


class CacheCounts(Structure):
    """struct cache_counts: since the beginning; times in nanoseconds."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("bytes", "reads", "wanted", "missed", "missed_bytes", "waited", "busy"),
            *("hinted", "hits_of_hints", "wasted_bytes", "traced"),
        )
    )
    bytes: int
    reads: int
    wanted: int
    missed: int
    missed_bytes: int
    waited: int
    busy: int
    hinted: int
    hits_of_hints: int
    wasted_bytes: int
    traced: int


FUNCTIONS: Prototypes = {
    "hetrun_experts_open": (c_void_p, POINTER(_CacheSetup)),
    "hetrun_experts_supply": (c_void_p, c_void_p),
    "hetrun_experts_begin": (None, c_void_p, c_int64),
    "hetrun_experts_listen": (None, c_void_p, c_int64),
    "hetrun_experts_stop": (None, c_void_p),
    "hetrun_experts_restart": (None, c_void_p),
    "hetrun_experts_fault": (c_int, c_void_p, POINTER(ReadFault)),
    "hetrun_experts_counts": (None, c_void_p, POINTER(CacheCounts)),
    "hetrun_experts_resize": (None, c_void_p, c_int64, c_int64),
    "hetrun_experts_widen": (None, c_void_p, c_int64),
    "hetrun_experts_worth": (c_void_p, c_void_p),
    "hetrun_experts_half_life": (c_double, c_void_p),
    "hetrun_experts_trace": (c_void_p, c_void_p),
    "hetrun_experts_held": (c_int64, c_void_p, c_int64),
    "hetrun_experts_close": (None, c_void_p),
}


@cache
def library() -> ctypes.CDLL | None:
    """The library, if it can be used here."""
    return load_built(Path(__file__).parent / NAME, ("hetrun_experts_version", VERSION), FUNCTIONS)


@dataclass(frozen=True, slots=True)
class ExpertReading:
    """How experts are read."""

    buffers: int
    threads: int
    direct: bool = True
    most: int = 0  # buffers that there may be in all


class ExpertCache:
    """What a backend takes experts from (`weight_streaming.ExpertSupply`); it begins without a slot.

    All but `stop` belongs to the engine's thread.
    """

    def __init__(self, records: Records, reading: ExpertReading, read: ReadFunction | None = None) -> None:
        """`read` takes the place of pread, for tests."""
        found = library()
        if found is None:
            raise OSError("the library expert_slots.c was not built")
        self.records, self._dll, self._read = records, found, read
        self.counts_of_kinds = [0] * len(records.sizes)
        weights = [w for mixture in records.mixtures for w in mixture.weights]
        self._opened = OpenFiles(weights, reading.direct)
        self._closing = threading.Lock()
        self._cache: int | None = None
        self.buffers, self._most_buffers = 0, max(reading.buffers, reading.most)
        try:
            self._regions = [
                ReservedMemory(size * count, in_huge_pages=True)
                for size, count in zip(records.sizes, records.counts, strict=True)
            ]
            self._cache = self._open(reading)
            self.widen(reading.buffers)
        except BaseException:
            self._opened.close()
            raise

    def _open(self, reading: ExpertReading) -> int:
        files = file_table(self._opened.files)
        sizes, counts = self.records.sizes, self.records.counts
        kinds = (_ExpertKind * len(sizes))(
            *(_ExpertKind(r.address, s, 0, n) for r, s, n in zip(self._regions, sizes, counts, strict=True))
        )
        table = self.records.table(self._opened.numbers)
        first = np.ascontiguousarray(self.records.first, np.int64)
        setup = _CacheSetup(
            len(table),
            len(self.records.mixtures),
            len(sizes),
            self._most_buffers,
            self.records.buffer_bytes,
            reading.threads,
            len(files),
            TRACED,
            table.ctypes.data,
            first.ctypes.data,
            ctypes.addressof(kinds),
            ctypes.addressof(files),
            (c_double * len(HALF_LIVES))(*HALF_LIVES),
            FIRST_RULE,
        )
        setup.read = address_of(self._read)
        address: int | None = self._dll.hetrun_experts_open(byref(setup))
        if not address:
            raise OSError(ctypes.get_errno(), f"no cache of {reading.buffers} buffers")
        return address

    @property
    def address(self) -> int:
        """Of the `struct expert_supply`, good until `close`."""
        address: int = self._dll.hetrun_experts_supply(self._cache)
        return address

    @property
    def files(self) -> Sequence[str]:
        """That experts are read from."""
        return self._opened.paths

    # --- memory

    def resize(self, counts: Sequence[int]) -> None:
        """Between passes: give each kind this many slots; what is worth most stays."""
        for kind, (before, count) in enumerate(zip(self.counts_of_kinds, counts, strict=True)):
            if before != count:
                self._dll.hetrun_experts_resize(self._cache, kind, count)
        self.counts_of_kinds = list(counts)

    def widen(self, buffers: int) -> None:
        """Between passes: how many experts are read, or wait to be packed, at once from now on."""
        self.buffers = min(buffers, self._most_buffers)
        self._dll.hetrun_experts_widen(self._cache, self.buffers)

    @property
    def promised_bytes(self) -> int:
        """What the slots take once all were written."""
        return self._whole(self.counts_of_kinds)

    @property
    def held_bytes(self) -> int:
        """What they take now."""
        kinds = range(len(self.records.sizes))
        return self._whole([self._dll.hetrun_experts_held(self._cache, kind) for kind in kinds])

    def _whole(self, counts: Sequence[int]) -> int:
        """Memory comes in pages of 2 MiB."""
        return sum(
            -(-count * size // HUGE_PAGE) * HUGE_PAGE
            for count, size in zip(counts, self.records.sizes, strict=True)
        )

    @property
    def worth(self) -> NDArray[np.float64]:
        """By how much each expert's choices count, as a logarithm; good until the next pass."""
        address = self._dll.hetrun_experts_worth(self._cache)
        memory = (c_double * len(self.records.where)).from_address(address)
        return np.ctypeslib.as_array(memory)

    @property
    def half_life(self) -> float:
        """Tokens after which a choice counts for half, by the rule that decides now."""
        found: float = self._dll.hetrun_experts_half_life(self._cache)
        return found

    # --- passes

    def begin(self, rows: int) -> None:
        """A pass of `rows` rows begins."""
        self._opened.check()
        self._dll.hetrun_experts_begin(self._cache, rows)

    def listen(self, on: bool) -> None:
        """Whether hints are followed from now on."""
        self._dll.hetrun_experts_listen(self._cache, on)

    def end(self) -> None:
        """The pass has ended. Raises what went wrong, if some experts did not come or if a file was changed
        meanwhile."""
        if error := self._error():
            raise error
        self._opened.check()

    def restart(self) -> None:
        """A pass has ended in the middle, and nothing computes."""
        self._dll.hetrun_experts_restart(self._cache)

    def stop(self) -> None:
        """From any thread: threads that wait for an expert get none any more, until `restart`."""
        with self._closing:
            if self._cache:
                self._dll.hetrun_experts_stop(self._cache)

    @property
    def counts(self) -> CacheCounts:
        """What was asked for and read so far."""
        counts = CacheCounts()
        self._dll.hetrun_experts_counts(self._cache, byref(counts))
        return counts

    @property
    def trace(self) -> NDArray[np.int32]:
        """The last choices, oldest first: the number of a pass, of an expert, and whether it was there."""
        written = self.counts.traced
        address = self._dll.hetrun_experts_trace(self._cache)
        memory = (ctypes.c_int32 * (3 * TRACED)).from_address(address)
        ring = np.ctypeslib.as_array(memory).reshape(-1, 3)
        return ring[:written].copy() if written <= TRACED else np.roll(ring, -(written % TRACED), axis=0)

    def _error(self) -> HetrunError | None:
        fault = ReadFault()
        if not self._dll.hetrun_experts_fault(self._cache, byref(fault)):
            return None
        return self._opened.explained(fault, self._name_at)

    def _name_at(self, path: str, at: int) -> str:
        first = self.records.first
        for number, where in enumerate(self.records.where):
            for i, part in enumerate(where):
                if part.path == path and part.offset <= at < part.offset + part.nbytes:
                    mixture = int(np.searchsorted(first, number, "right")) - 1
                    weight: Weight = self.records.mixtures[mixture].weights[i]
                    return f"{weight.name} (expert {number - first[mixture]})"
        return "the model"

    def close(self) -> None:
        """Give memory, threads and files back; no runner is at work any more."""
        with self._closing:
            found, self._cache = self._cache, None
            if found:
                self._dll.hetrun_experts_close(found)
        for region in self._regions:
            region.close()
        self._opened.close()
