"""The C library's allocator: what it keeps of memory that was freed."""

from __future__ import annotations

import ctypes
from functools import cache

from hetrun.system.native_library import MissingFunction, load_library


def give_back() -> None:
    """Have the system get the whole pages that are free in the allocator's arenas.

    glibc keeps them. What was freed in large pieces even more so: for each of these it raises the size from
    which memory comes from the system by itself, so that compiled graphs and packed weights soon lie in
    arenas, in which a small piece that is still in use holds all that lies below it. Where there is another C
    library this does nothing.
    """
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL | None:
    try:
        return load_library(None, {"malloc_trim": (ctypes.c_int, ctypes.c_size_t)})
    except MissingFunction:  # no glibc
        return None
