"""The C functions beside this file, where there was a compiler when hetrun was installed."""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_double, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hetrun.sampling.rng import Floats
from hetrun.system.native_library import Prototypes, load_built

if TYPE_CHECKING:
    from hetrun.sampling.fast_path import FastPath

NAME = "top_logits.so"  # beside this file
VERSION = 2  # of their arguments
MOST = 128  # values that they may be asked for
NOTHING = -1  # there is something in the row that others must explain

ROW = c_void_p, c_int64, c_int64
FUNCTIONS: Prototypes = {
    "hetrun_greatest": (c_int64, *ROW, c_void_p, c_void_p),
    "hetrun_draw": (c_int64, *ROW, *(c_double,) * 4),
}


class NativeTopK(threading.local):
    """What is done with the k greatest of a row. None: a row, or a k, that is not for C."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        self._find, self._draw = dll.hetrun_greatest, dll.hetrun_draw
        # Each thread has results of its own.
        self._places, self._values = (c_int64 * MOST)(), (c_float * MOST)()
        self._results = ctypes.addressof(self._places), ctypes.addressof(self._values)

    def find(self, row: Floats, k: int) -> tuple[list[int], list[float]] | None:
        """Their places and themselves, in descending order, equals by ascending place, none at -inf."""
        if not _fit(row, k):
            return None
        found: int = self._find(row.ctypes.data, len(row), k, *self._results)
        return None if found == NOTHING else (self._places[:found], self._values[:found])

    def draw(self, row: Floats, usual: FastPath, u: float) -> int | None:
        """The token on which u, in [0, 1), falls."""
        if not _fit(row, usual.k):
            return None
        rules = usual.p, usual.min_p, usual.temperature
        token: int = self._draw(row.ctypes.data, len(row), usual.k, *rules, u)
        return None if token == NOTHING else token


def _fit(row: Floats, k: int) -> bool:
    return k <= MOST and row.dtype == np.float32 and row.flags.c_contiguous


@cache
def greatest() -> NativeTopK | None:
    """The functions, where they were built, and from the source that this file goes with."""
    path, version = Path(__file__).parent / NAME, ("hetrun_greatest_version", VERSION)
    dll = load_built(path, version, FUNCTIONS, locked=True)
    return NativeTopK(dll) if dll else None
