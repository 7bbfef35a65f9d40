"""Which pages of mapped weights are in memory: the library pages.c, as Python sees it."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path

from hetrun.system.native_library import address_of, load_built

NAME = "pages.so"  # beside this file
NONE = -1


class Range(Structure):
    """struct range: neighbouring bytes of a file that are read by one product."""

    _fields_ = (("address", c_size_t), *((name, c_int64) for name in ("bytes", "file", "offset")))


class PagingUnit(Structure):
    """struct unit: what comes and goes together."""

    _fields_ = tuple(
        (name, c_int64)
        for name in ("range", "ranges", "bytes", "every_pass", "before", "behind", "state", "visit")
    )


class Pool(Structure):
    """struct pool."""

    _fields_ = (
        ("units", c_void_p),
        ("ranges", c_void_p),
        *((name, c_int64) for name in ("page", "room", "resident", "first", "last")),
        ("coming", c_void_p),
        ("going", c_void_p),
        *((name, c_int64) for name in ("n_coming", "n_going", "visits", "asked_bytes", "read_bytes")),
    )


class Visit(Structure):
    """struct visit: what the products behind a node read."""

    _fields_ = (
        ("pool", c_void_p),
        ("ids", c_void_p),
        *((name, c_int64) for name in ("rows", "used", "stride", "unit", "units", "next")),
    )


class BringNode(Structure):
    """struct bring: a node that waits for some ranges of each unit of a visit."""

    _fields_ = (("visit", c_void_p), ("first", c_int64), ("end", c_int64))


_SIZES = [ctypes.sizeof(s) for s in (Pool, PagingUnit, Range, Visit, BringNode)]
LAYOUT = sum(a * b for a, b in zip(_SIZES, (1000000000, 1000000, 10000, 100, 1), strict=True))


class Pager:
    """The library's functions: two are nodes of ggml's graphs, called by their addresses."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        self._trim = dll.hetrun_pages_trim  # a GiB takes 50 ms: without the interpreter's lock
        self.visit = address_of(dll.hetrun_pages_visit)
        self.bring = address_of(dll.hetrun_pages_bring)

    def trim(self, pool: Pool) -> None:
        """Give back what is over the limit."""
        self._trim(ctypes.addressof(pool))


@cache
def pager() -> Pager | None:
    """The library, where it was built, and from the sources that this file goes with."""
    path, layout = Path(__file__).parent / NAME, ("hetrun_pages_layout", LAYOUT)
    dll = load_built(path, layout, {"hetrun_pages_trim": (None, c_void_p)})
    return Pager(dll) if dll else None
