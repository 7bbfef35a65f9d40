"""Mixtures of which some experts are left to others: the library experts.c, as Python sees it."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int64, c_void_p
from functools import cache
from pathlib import Path

from hetrun.system.native_library import address_of, load_built

NAME = "experts.so"  # beside this file


class Pairs(Structure):
    """struct pairs: rows with the experts that compute them here."""

    _fields_ = (
        ("chosen", c_void_p),
        ("shares", c_void_p),
        *((name, c_int64) for name in ("rows", "used", "stride")),
        *((name, c_void_p) for name in ("left_out", "expert", "row", "share", "sizes")),
        ("n_sizes", c_int64),
        ("count", c_int64),
    )


class Sum(Structure):
    """struct sum: their results into the rows."""

    _fields_ = (*((name, c_void_p) for name in ("pairs", "results", "out")), ("width", c_int64))


LAYOUT = 1000 * ctypes.sizeof(Pairs) + ctypes.sizeof(Sum)


class Sorter:
    """The library's functions: nodes of ggml's graphs, called by their addresses."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        self.sort = address_of(dll.hetrun_experts_sort)
        self.sum = address_of(dll.hetrun_experts_sum)


@cache
def sorter() -> Sorter | None:
    """The library, where it was built, and from the sources that this file goes with."""
    dll = load_built(Path(__file__).parent / NAME, ("hetrun_experts_layout", LAYOUT))
    return Sorter(dll) if dll else None
