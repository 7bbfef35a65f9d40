"""Memory that ends where nothing may be read or written: at a red zone of AddressSanitizer, or at a guard
page."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int, c_size_t, c_void_p
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from hetrun.system.native_library import Prototypes, load_library

Array = npt.NDArray[Any]
LINE = 64
PAGE = mmap.PAGESIZE
CALLS: Prototypes = {
    "posix_memalign": (c_int, c_void_p, c_size_t, c_size_t),
    "free": (None, c_void_p),
    "mmap": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_long),
    "mprotect": (c_int, c_void_p, c_size_t, c_int),
    "munmap": (c_int, c_void_p, c_size_t),
}
NOTHING, READ_WRITE, PRIVATE_ANONYMOUS = 0, 3, 0x22


class Memory:
    """Arrays for one input. The compiler's checks see every load that it makes by itself, not those of some
    instructions: so some arrays end at a guard page, and some begin behind one."""

    def __init__(self, rng: Random) -> None:
        self._rng, self._libc = rng, load_library(None, CALLS)
        self._allocated: list[int] = []
        self._mapped: list[tuple[int, int]] = []

    def array(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.uint8, align: int = 0) -> Array:
        """An array of exactly this size, at a multiple of `align`, or only of what a number takes."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        size, step = count * kind.itemsize, align or min(kind.itemsize, 8)
        if not size:
            return np.zeros(shape, kind)
        place = self._rng.choice((self._red, self._red, self._before_a_wall, self._behind_a_wall))
        memory = (ctypes.c_uint8 * size).from_address(place(size, step))
        found: Array = np.ctypeslib.as_array(memory).view(kind).reshape(shape)
        return found

    def copy(self, x: Array, align: int = 0) -> Array:
        """The same numbers in such memory."""
        made = self.array(x.shape, x.dtype, align)
        made[...] = x
        return made

    def full(
        self, shape: int | tuple[int, ...], value: float, dtype: npt.DTypeLike = np.float32, align: int = 0
    ) -> Array:
        """Filled with a number."""
        made = self.array(shape, dtype, align)
        made[...] = value
        return made

    def _red(self, size: int, step: int) -> int:
        """As little aligned as it may be: the sanitizer's memory begins at 16 bytes."""
        off = step * self._rng.randrange(LINE // step) if step < LINE else 0
        found = c_void_p()
        if self._libc.posix_memalign(ctypes.byref(found), LINE, size + off):
            raise MemoryError
        assert found.value is not None
        self._allocated.append(found.value)
        return found.value + off

    def _walls(self, size: int) -> tuple[int, int]:
        pages = -(-size // PAGE) * PAGE
        whole = self._libc.mmap(None, pages + 2 * PAGE, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0)
        if whole in (None, 2**64 - 1):
            raise MemoryError
        self._mapped.append((whole, pages + 2 * PAGE))
        for at in (whole, whole + PAGE + pages):
            if self._libc.mprotect(at, PAGE, NOTHING):
                raise MemoryError
        return whole + PAGE, whole + PAGE + pages

    def _before_a_wall(self, size: int, step: int) -> int:
        return int((self._walls(size)[1] - size) // step * step)

    def _behind_a_wall(self, size: int, step: int) -> int:
        return self._walls(size)[0]

    def close(self) -> None:
        """All of it goes: nothing may use it any more."""
        for address in self._allocated:
            self._libc.free(address)
        for address, size in self._mapped:
            self._libc.munmap(address, size)


@contextmanager
def memory(rng: Random) -> Iterator[Memory]:
    """Memory for an input. If the input fails, it stays: what tells of the fault may still look at it."""
    made = Memory(rng)
    yield made
    made.close()
