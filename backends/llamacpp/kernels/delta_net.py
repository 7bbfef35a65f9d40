"""The short convolution and the gated delta rule as functions of our own: ggml's read a state and write it in
one place, with as many tokens of each sequence. These take what a pass has."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

from hetrun.graph.ops import CausalConv, DeltaNet, Stateful
from hetrun.system.native_library import Prototypes, address_of, load_built

NAME = "recurrent.so"  # beside this file
MOST_TAPS, MOST_ROW = 64, 4096  # as recurrent.h has them
FIELDS = 3  # of `struct sequence`, an array of int64: its first token, its end, and the slot that is read


class PassStates(Structure):
    """struct pass: what layers have in common in one pass."""

    _fields_ = (("n", c_int64), ("sequences", c_void_p), ("write", c_void_p))


class Convolution(Structure):
    """struct convolution: that of one layer."""

    _fields_ = (
        ("pass_states", POINTER(PassStates)),
        ("states", c_void_p),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("x", "out", "kernel", "bias")),
        *((name, c_int64) for name in ("x_stride", "out_stride", "width", "taps", "silu", "level")),
    )


class DeltaRule(Structure):
    """struct delta: the delta rule of one layer, or Mamba 2's."""

    _fields_ = (
        ("pass_states", POINTER(PassStates)),
        ("states", c_void_p),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("x", "decay", "rate", "decays", "biases", "skips", "out")),
        *((name, c_int64) for name in ("x_stride", "decay_stride", "rate_stride", "out_stride")),
        *(
            (name, c_int64)
            for name in (
                *("k_heads", "v_heads", "k_dim", "v_dim", "q_at", "k_at", "v_at"),
                *("row", "tiled", "log", "mamba", "level"),
            )
        ),
        ("scratch", c_void_p),
        *((name, c_int64) for name in ("scratch_size", "slots")),
        ("counters", c_void_p),
        ("eps", c_double),
    )


LAYOUT = 1000000 * 8 * FIELDS + 1000 * ctypes.sizeof(Convolution) + ctypes.sizeof(DeltaRule)

FUNCTIONS: Prototypes = {
    "hetrun_convolve": (None, c_void_p, c_int, c_int, c_void_p),
    "hetrun_delta": (None, c_void_p, c_int, c_int, c_void_p),
    "hetrun_delta_scratch": (c_int64, c_int64),
    "hetrun_delta_level": (c_int,),
}


class DeltaNets:
    """The library's functions."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        self.convolve, self.remember = dll.hetrun_convolve, dll.hetrun_delta
        self.convolve_address = address_of(self.convolve)
        self.remember_address = address_of(self.remember)
        self._scratch = dll.hetrun_delta_scratch
        self.best: int = dll.hetrun_delta_level()
        self.level: int = self.best

    def takes(self, attrs: Stateful) -> bool:
        """Whether there is room on a thread's stack for what an op of this size works in."""
        if isinstance(attrs, CausalConv):
            return attrs.kernel <= MOST_TAPS
        return isinstance(attrs, DeltaNet) and attrs.row <= MOST_ROW

    def scratch(self, row: int) -> int:
        """Floats that a thread needs for matrices with rows of that many."""
        size: int = self._scratch(row)
        return size


@cache
def delta_nets() -> DeltaNets | None:
    """The library, where it was built, and from the sources that this file goes with."""
    path, layout = Path(__file__).parent / NAME, ("hetrun_delta_layout", LAYOUT)
    dll = load_built(path, layout, FUNCTIONS, locked=True)
    return DeltaNets(dll) if dll else None
