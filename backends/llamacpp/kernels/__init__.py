"""C functions of our own that run as nodes of ggml's graphs, where ggml leaves speed on the table.

The library is built when hetrun is installed, if there is a C compiler, and everything works without it. It
knows nothing of Python nor of ggml's structures: what a function needs is in the structures below.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

from hetrun.backends.llamacpp.kernels.matmul import products
from hetrun.system.native_library import Prototypes, address_of, load_built

NAME = "attention.so"  # beside this file
LEVELS = ("portable", "AVX2", "AVX-512")  # sets of instructions that each function is compiled for
TYPES = (0, 1, 8)  # of keys and values, as ggml numbers them: F32, F16, Q8_0


class Sequence(Structure):
    """struct sequence: what one sequence of a pass brings; all of them are an array of int64."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            "first",
            "length",
            "position",
            "row",
            "rows",
            "chunks",
            "chunks_before",
            "partials_before",
        )
    )


class PassPart(Structure):
    """struct pass: what layers that see equally far have in common."""

    _fields_ = (
        ("n", c_int64),
        ("sequences", c_void_p),
        ("ends", c_void_p),
        ("window", c_int64),
        ("chunks", c_int64),
        ("partials", c_int64),
        ("memory", c_void_p),
        ("counters", c_void_p),
    )


class AttentionLayer(Structure):
    """struct layer: the attention of one layer."""

    _fields_ = (
        ("pass_part", POINTER(PassPart)),
        ("keys", c_void_p),
        ("values", c_void_p),
        *((name, c_int64) for name in ("key_stride", "value_stride", "head_bytes")),
        *((name, c_int64) for name in ("type", "head_dim", "heads", "kv_heads")),
        ("queries", c_void_p),
        ("out", c_void_p),
        *((name, c_int64) for name in ("query_stride", "out_stride")),
        ("scratch", c_void_p),
        *((name, c_int64) for name in ("scratch_size", "slots", "level")),
        ("scale", c_double),
        ("softcap", c_double),
        ("sinks", c_void_p),
    )


FIELDS = len(Sequence._fields_)
LAYOUT = 1000000 * ctypes.sizeof(Sequence) + 1000 * ctypes.sizeof(PassPart) + ctypes.sizeof(AttentionLayer)
TILE = 16  # what rows of floats are padded to

FUNCTIONS: Prototypes = {
    "hetrun_attention_plan": (c_int64, c_void_p),
    "hetrun_attention_scratch": (c_int64, *(c_int64,) * 4),
    "hetrun_attend": (None, c_void_p, c_int, c_int, c_void_p),
    "hetrun_kernels_level": (c_int,),
}


class Kernels:
    """The library's functions."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        self._plan, self._scratch = dll.hetrun_attention_plan, dll.hetrun_attention_scratch
        self.attend = dll.hetrun_attend
        self.address = address_of(self.attend)
        self.best: int = dll.hetrun_kernels_level()
        self.level: int = self.best

    @property
    def instructions(self) -> str:
        """What it uses of this CPU."""
        return LEVELS[self.level]

    @property
    def is_wide(self) -> bool:
        """Whether it has vectors of 8 floats or more."""
        return self.level > 0

    def plan(self, part: PassPart) -> int:
        """Cut the work of a pass; returns how many partial results each query head will have."""
        partials: int = self._plan(byref(part))
        return partials

    def scratch(self, rows: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """Floats that a thread needs for its work, with sequences of up to `rows` query rows."""
        size: int = self._scratch(rows, heads, kv_heads, head_dim)
        return size


def partial_size(head_dim: int) -> int:
    """Floats of one partial result."""
    return TILE + -(-head_dim // TILE) * TILE


@cache
def kernels() -> Kernels | None:
    """The library, where it was built, and from the sources that this file goes with."""
    path, layout = Path(__file__).parent / NAME, ("hetrun_kernels_layout", LAYOUT)
    dll = load_built(path, layout, FUNCTIONS, locked=True)
    return Kernels(dll) if dll else None


def remark() -> str:
    """Which kernels there are, for who asks what works here."""
    found = {"attention": kernels(), "products": products()}
    using = [f"{name} by {library.instructions}" for name, library in found.items() if library]
    if not using:
        return "no kernels of our own (they need a C compiler when hetrun is installed)"
    return f"own kernels: {', '.join(using)}"
