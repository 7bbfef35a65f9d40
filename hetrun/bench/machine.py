"""What the machine can do, and what else it does at the moment."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from statistics import median
from time import perf_counter

BYTES = 512 << 20  # read in one round, by all threads together: many times the caches of today
LEAST = 64 << 20  # by one thread
ROUNDS = 40  # half a second on most machines
BUSY = 0.5  # load average above which numbers are not to be trusted


def load_average() -> float:
    """Of the last minute."""
    return round(os.getloadavg()[0], 2)


def dram_bandwidth(threads: int, rounds: int = ROUNDS) -> float:
    """Bytes per second that so many threads read from memory together when they are left alone."""
    size = max(BYTES // threads, LEAST)
    # A search for a byte that is not there reads everything and writes nothing, at the speed of the widest
    # vectors that the C library knows, without the interpreter lock, and needs no compiler.
    search = ctypes.CDLL(None).memchr
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    memory = mmap.mmap(-1, threads * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = (ctypes.c_char * (threads * size)).from_buffer(memory)
    address = ctypes.addressof(start)
    ctypes.memset(address, 1, threads * size)
    together = threading.Barrier(threads)
    spans: list[list[tuple[float, float]]] = [[] for _ in range(threads)]

    def read(thread: int) -> None:
        for _ in range(rounds):
            together.wait()
            begin = perf_counter()
            search(address + thread * size, 2, size)
            spans[thread].append((begin, perf_counter()))

    readers = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(threads)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    del start
    memory.close()
    # From when the first began to when the last was done.
    times = [max(b for _, b in each) - min(a for a, _ in each) for each in zip(*spans, strict=True)]
    # The middle of the best quarter: others slow most rounds down, and a few are too good to be true.
    usual: float = median(sorted(times)[: max(1, rounds // 4)])
    return threads * size / usual
