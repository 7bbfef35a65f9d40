"""Memory that can be seen in several places: the page table shows the same pages at more than one address.

It is a file without a name and one mapping of it, both as large as everybody could ever need. The system
gives a page when it is first written, and takes it back when it is dropped. Where there are no such files
the memory is plain, and nothing can be shown twice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Iterable
from contextlib import suppress
from ctypes import c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

from hetrun.errors import BudgetError
from hetrun.system import holes
from hetrun.system.native_library import load_library

MAP_FIXED = 0x10  # Linux; Python has no name for it
MAP_FAILED = c_void_p(-1).value
# Python has this name from 3.13 on. The number is that of most machines, and only a hint.
NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0)
MOST_MAPPINGS = 65530  # of a process, where the system does not say


class ZeroedMemory:
    """Zeros at an address that stays; given back when the last array over it goes."""

    def __init__(self, size: int) -> None:
        """OSError or OverflowError where there is no address space for it."""
        size = max(-(-size // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        self._fd = _file(size)
        if self._fd is None:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        else:
            weakref.finalize(self, os.close, self._fd)
            mapping = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED | NO_RESERVE)
        self._mapping = mapping
        self.bytes = np.frombuffer(mapping, np.uint8)
        self.address = int(self.bytes.ctypes.data)

    @property
    def can_show(self) -> bool:
        """Whether pages can be seen in several places."""
        return self._fd is not None

    @property
    def held_bytes(self) -> int | None:
        """Memory that the system has given, however often it is seen; None where that cannot be told."""
        return None if self._fd is None else os.fstat(self._fd).st_blocks * 512

    def show(self, at: int, pages: int, size: int) -> None:
        """From `at` on, see what was first seen from `pages` on: whole pages all three; OSError if not."""
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED | NO_RESERVE
        found = _system().mmap(self.address + at, size, protection, flags, self._fd, pages)
        if found == MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mmap")

    def drop(self, pages: int, size: int) -> None:
        """Give the whole pages in these bytes back, wherever they are seen; they are zeros again."""
        end = (pages + size) // mmap.PAGESIZE * mmap.PAGESIZE
        pages = -(-pages // mmap.PAGESIZE) * mmap.PAGESIZE
        if end <= pages:
            return
        if self._fd is not None:
            with suppress(OSError):
                holes.punch(self._fd, pages, end - pages)
        elif hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED, pages, end - pages)

    def close(self) -> None:
        """Give all pages back now; the addresses stay until the last array over them goes."""
        self.drop(0, len(self._mapping))


def whole_pages(size: int) -> int:
    """Bytes of the whole pages that `size` bytes lie in."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def reserve(each: Iterable[int], sequences: int) -> tuple[ZeroedMemory, int]:
    """Address space for two tables of each layer, and for how many sequences that is."""
    each = list(each)
    while True:
        try:
            return ZeroedMemory(2 * sum(whole_pages(sequences * size) for size in each)), sequences
        except (OSError, OverflowError, ValueError) as e:
            if sequences == 1:
                raise BudgetError(
                    f"the system does not have enough address space for {sum(each) * 2 / 2**30:.1f} GiB "
                    "of keys and values; use a smaller --ctx"
                ) from e
            sequences = -(-sequences // 2)


def most_mappings() -> int:
    """How many mappings this process may have."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return MOST_MAPPINGS


def _file(size: int) -> int | None:
    """A file without a name, of `size` bytes; None where the system has none."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return None
    try:
        fd = os.memfd_create("hetrun-kv")
    except OSError:
        return None
    try:
        os.ftruncate(fd, size)
    except (OSError, OverflowError):  # a limit on the size of files
        os.close(fd)
        return None
    return fd


@cache
def _system() -> ctypes.CDLL:
    """The C library, with the call that Python does not have: a mapping at an address."""
    mapping = {"mmap": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_int64)}
    return load_library(None, mapping, keep_errno=True)
