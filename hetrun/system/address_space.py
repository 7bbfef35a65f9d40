"""Addresses that are reserved, and get memory where something is written."""

from __future__ import annotations

import mmap
import platform
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
MADV_COLLAPSE = 25  # Linux 6.1; Python has no name for it
HUGE_PAGE = 2 << 20
# Python has this name from 3.13 on. The number is that of most machines, and only a hint.
NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0)


class ReservedMemory:
    """Zeros that take no memory until they are written, and can be given back piece by piece."""

    def __init__(self, size: int, in_huge_pages: bool = False) -> None:
        """`in_huge_pages`: memory comes in pages of 2 MiB, where the system has them."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        size = max(size, mmap.PAGESIZE)
        self._mapping = mmap.mmap(-1, size + HUGE_PAGE * in_huge_pages, flags=flags)
        everything = np.frombuffer(self._mapping, np.uint8)
        skip = -int(everything.ctypes.data) % HUGE_PAGE if in_huge_pages else 0
        self._bytes = everything[skip : skip + size]
        self.address = int(self._bytes.ctypes.data)
        self.nbytes = self._bytes.nbytes
        if in_huge_pages:
            with suppress(OSError):
                self._mapping.madvise(MADV_HUGEPAGE)

    def view(self, at: int, size: int) -> NDArray[np.uint8]:
        """Some of the bytes."""
        return self._bytes[at : at + size]

    def drop(self, at: int, size: int) -> None:
        """Give the whole pages among these bytes back; they are zeros again."""
        first = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (at + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, end - first)

    def settle(self, at: int, size: int) -> None:
        """These bytes are written, and going to stay: products read them faster from 2 MiB pages. Not for
        what may soon be given back: the system keeps such a page as a whole for a while."""
        first = -(-(self.address + at) // HUGE_PAGE) * HUGE_PAGE - self.address
        end = (self.address + at + size) // HUGE_PAGE * HUGE_PAGE - self.address
        if first < end:
            with suppress(OSError):  # of an older system, or one without a free 2 MiB page
                self._mapping.madvise(MADV_COLLAPSE, first, end - first)

    def close(self) -> None:
        """Give everything back now, even if the addresses are still held."""
        self._mapping.madvise(mmap.MADV_DONTNEED)
