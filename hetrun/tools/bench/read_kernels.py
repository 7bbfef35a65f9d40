"""Ways to read a block of memory as fast as it can be read, by threads that begin together."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from ctypes import c_char, c_double, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from hetrun.system.native_library import Prototypes, load_built, load_library

NAME = "read_loops.so"  # beside this file, where there was a compiler when hetrun was installed
VERSION = 1  # of its functions' arguments
LINE = 512  # bytes: no thread's part is cut finer
OPEN = 1 << 62  # more than will ever arrive
FUNCTIONS: Prototypes = {
    "hetrun_reading_ways": (c_int64,),
    "hetrun_read": (None, c_int64, c_void_p, *(c_int64,) * 4, *(c_void_p,) * 3),
}


@dataclass(frozen=True, slots=True)
class ReadRound:
    """What each thread reads in one round: its part of a block, a number of times."""

    threads: int
    part: int
    times: int = 1

    @property
    def nbytes(self) -> int:
        """That all of them read in a round."""
        return self.threads * self.part * self.times


class ReadBlock:
    """Memory for some threads to read. What is not used any more is given back."""

    def __init__(self, work: ReadRound) -> None:
        self._memory = mmap.mmap(
            -1, max(work.threads * work.part, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._start: Any = c_char.from_buffer(self._memory)
        self._address, self.work = ctypes.addressof(self._start), work
        # Each thread touches its own part first, so that it lies near that thread.
        side_by_side(work.threads, lambda i: ctypes.memset(self.part(i), 1, work.part))

    def part(self, thread: int) -> int:
        """Where a thread's part begins."""
        return self._address + thread * self.work.part

    def __enter__(self) -> ReadBlock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._start = None
        self._memory.close()


# The seconds that each round took, from when the first thread began to when the last was done.
Reader = Callable[[ReadBlock, int], Sequence[float]]


def side_by_side(
    threads: int, work: Callable[[int], object], release: Callable[[], None] | None = None
) -> None:
    """Call `work` in this many threads; where one cannot be started, `release` frees those waiting for it."""
    started: list[threading.Thread] = []
    try:
        for i in range(threads):
            thread = threading.Thread(target=work, args=(i,), daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        if release:
            release()
        raise
    finally:
        for thread in started:
            thread.join()


def by_search(block: ReadBlock, rounds: int) -> Sequence[float]:
    """With the C library's search for a byte that is not there: it needs no compiler, and no interpreter lock
    while it runs, but on some machines memory gives half as much again."""
    work, together = block.work, threading.Barrier(block.work.threads)
    search = load_library(None, {"memchr": (c_void_p, c_void_p, c_int, c_size_t)}).memchr
    spans: list[list[tuple[float, float]]] = [[] for _ in range(work.threads)]

    def read(thread: int) -> None:
        for _ in range(rounds):
            together.wait()
            begin = perf_counter()
            for _ in range(work.times):
                search(block.part(thread), 2, work.part)
            spans[thread].append((begin, perf_counter()))

    side_by_side(work.threads, read, together.abort)
    return [max(b for _, b in each) - min(a for a, _ in each) for each in zip(*spans, strict=True)]


@dataclass(frozen=True, slots=True)
class CompiledRead:
    """One of the ways of the library beside this file."""

    read: Callable[..., None]
    way: int

    def __call__(self, block: ReadBlock, rounds: int) -> Sequence[float]:
        """All rounds in C: Python takes longer to let threads begin than some blocks take to be read."""
        work, arrived = block.work, c_int64(0)
        begins, ends = ([(c_double * rounds)() for _ in range(work.threads)] for _ in range(2))

        def read(thread: int) -> None:
            sizes = work.part, work.times, work.threads, rounds
            times = ctypes.addressof(begins[thread]), ctypes.addressof(ends[thread])
            self.read(self.way, block.part(thread), *sizes, ctypes.addressof(arrived), *times)

        def release() -> None:
            arrived.value = OPEN

        side_by_side(work.threads, read, release)
        return [
            max(b) - min(a) for a, b in zip(zip(*begins, strict=True), zip(*ends, strict=True), strict=True)
        ]


@cache
def readers() -> tuple[Reader, ...]:
    """All ways that there are here; which is fastest depends on the machine, and on where the block lies."""
    dll = load_built(Path(__file__).parent / NAME, ("hetrun_reading_version", VERSION), FUNCTIONS)
    if dll is None:
        return (by_search,)
    return tuple(CompiledRead(dll.hetrun_read, way) for way in range(dll.hetrun_reading_ways()))
