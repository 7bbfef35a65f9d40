"""What a process holds that an operation may leave behind: files, threads, memory."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SETTLE_S = 5.0  # until threads have ended


class _Heap(ctypes.Structure):
    """struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Heap


@dataclass(frozen=True, slots=True)
class Held:
    """What a process has of what may leak."""

    files: tuple[str, ...]
    threads: int
    heap: int
    mapped: int


def held() -> Held:
    """Now; PYTHONMALLOC=malloc has Python's objects on the same heap."""
    gc.collect()
    files = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            files.append(os.readlink(f"/proc/self/fd/{fd}").split("[")[0])  # a socket has a number of its own
    heap = _libc.mallinfo2()
    with open("/proc/self/status", encoding="ascii") as lines:
        size = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
    threads = len(os.listdir("/proc/self/task"))
    return Held(tuple(sorted(files)), threads, heap.uordblks + heap.hblkhd, size)


def settled(before: Held) -> Held:
    """Once threads that were told to end have ended."""
    end = time.monotonic() + SETTLE_S
    while (after := held()).threads > before.threads or Counter(after.files) - Counter(before.files):
        if time.monotonic() > end:
            break
        time.sleep(0.005)
    return after


def thread_names() -> list[str]:
    """As the system has them."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):
            found.append(Path("/proc/self/task", task, "comm").read_text().strip())
    return found
