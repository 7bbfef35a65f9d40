"""The C function beside this file, where there was a compiler when hetrun was installed."""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

from hetrun.sampling.draw import Floats

NAME = "greatest.so"  # beside this file
VERSION = 1  # of its arguments
MOST = 128  # values that it may be asked for
NOT_A_NUMBER = -1


class Greatest(threading.local):
    """The k greatest of a row; each thread has results of its own."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        self._function = dll.hetrun_greatest
        self._function.argtypes = (c_void_p, c_int64, c_int64, c_void_p, c_void_p)
        self._function.restype = c_int64
        self._places, self._values = (c_int64 * MOST)(), (c_float * MOST)()
        self._results = ctypes.addressof(self._places), ctypes.addressof(self._values)

    def __call__(self, row: Floats, k: int) -> tuple[list[int], list[float]] | None:
        """Their places and themselves, in descending order, equals by ascending place, none at -inf.
        None: somebody else must look, be it at a number that is none."""
        if k > MOST or row.dtype != np.float32 or not row.flags.c_contiguous:
            return None
        found: int = self._function(row.ctypes.data, len(row), k, *self._results)
        return None if found == NOT_A_NUMBER else (self._places[:found], self._values[:found])


@cache
def greatest() -> Greatest | None:
    """The function, where it was built, and from the source that this file goes with."""
    try:
        dll = ctypes.PyDLL(str(Path(__file__).parent / NAME))
        version = dll.hetrun_greatest_version
    except (OSError, AttributeError):
        return None
    version.restype = c_int64
    return Greatest(dll) if version() == VERSION else None
