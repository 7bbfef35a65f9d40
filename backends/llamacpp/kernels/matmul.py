"""Products of quantised weights in a layout of our own: the library products.c, as Python sees it."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetrun.system.native_library import Prototypes, address_of, declare, load_built, load_library

NAME = "products.so"  # beside this file
# Sets of instructions, as the library numbers them.
LEVELS = ("portable", "AVX2", "AVX-VNNI", "AVX-512 VNNI", "AMX", "dotprod")
PORTABLE = 0
ROWS = 16  # of a weight that lie side by side: it is packed in slices of a multiple of them
COUNTERS = 4  # int32, of a product
# What becomes of the results, as the library numbers it.
PLAIN, SWIGLU, GEGLU, GEGLU_ERF, CLAMPED = range(5)


class ProductStruct(Structure):
    """struct product: one product and what is fused with it."""

    _fields_ = (
        ("weights", c_void_p),
        *((name, c_int64) for name in ("type", "rows", "cols")),
        ("x", c_void_p),
        ("out", c_void_p),
        *((name, c_int64) for name in ("n", "x_stride", "out_stride")),
        ("gain", c_void_p),
        ("eps", c_double),
        ("bias", c_void_p),
        ("residual", c_void_p),
        *((name, c_int64) for name in ("residual_stride", "activation")),
        ("scratch", c_void_p),
        *((name, c_int64) for name in ("scratch_size", "slots")),
        ("counters", c_void_p),
        ("level", c_int64),
        ("next", c_void_p),
        ("partial", c_void_p),
        ("shared", c_void_p),
        ("second", c_void_p),
        *((name, c_void_p) for name in ("from_rows", "to_rows", "second_bias")),
        ("exact", c_int64),
    )

    @property
    def kept_rows(self) -> int:
        """Rows that its activations become, at most."""
        return int(self.n) * (2 if self.exact else 1)


class RoutingStruct(Structure):
    """struct routing: which rows each expert of a mixture takes."""

    _fields_ = (
        ("chosen", c_void_p),
        *((name, c_int64) for name in ("rows", "used", "stride", "experts")),
        *((name, c_void_p) for name in ("left_out", "first", "row", "pair")),
    )


class ExpertProducts(Structure):
    """struct expert_products: one product by all experts."""

    _fields_ = (
        ("each", ProductStruct),
        ("routing", c_void_p),
        ("bytes", c_int64),
        ("by_pair", c_int64),
        ("after", c_void_p),
    )


MATRICES = 3  # of an expert: gate, up, down
WAVE = 32  # experts that are multiplied by together


class Expert(Structure):
    """struct expert: one that is there."""

    _fields_ = (("number", c_int64), ("slot", c_void_p), ("stored", c_void_p * MATRICES))


class CachedMixture(Structure):
    """struct cached_mixture: a mixture whose experts come when they are wanted, as one node."""

    _fields_ = (
        ("inner", ExpertProducts),
        ("last", ExpertProducts),
        ("supply", c_void_p),
        ("mixture", c_int64),
        ("starts", c_int64 * MATRICES),
        ("experts", c_void_p),
        ("rows", c_void_p),
        ("given", c_int64),
        ("wave", Expert * WAVE),
        *((name, c_int32) for name in ("packing", "arrived", "turn", "dozers")),
    )


class ExpertHint(Structure):
    """struct expert_hint: what is likely to be wanted next."""

    _fields_ = (
        ("supply", c_void_p),
        ("mixture", c_int64),
        ("chosen", c_void_p),
        *((name, c_int64) for name in ("rows", "used", "stride")),
    )


class PartialWeightStruct(Structure):
    """struct partial: a weight of which not all pieces are in memory."""

    _fields_ = (
        ("supply", c_void_p),
        ("streamed", c_int64),
        ("pieces", c_int64),
        ("piece", c_void_p),  # int64 [pieces, 4]: first group, groups, where the rows of each half begin
        ("rank", c_void_p),  # int32 [pieces]
        ("taken", c_void_p),  # int32 [pieces]
    )


class RowLookup(Structure):
    """struct lookup: some rows of a packed weight as floats."""

    _fields_ = (
        ("weights", c_void_p),
        *((name, c_int64) for name in ("type", "rows", "cols")),
        ("ids", c_void_p),
        ("out", c_void_p),
        *((name, c_int64) for name in ("n", "out_stride", "level")),
        ("partial", c_void_p),
        ("supply", c_void_p),
        *((name, c_int64) for name in ("file", "offset")),
    )


ARGUMENTS = 2  # how often what functions are given was settled
LAYOUT = (
    1000000000 * ARGUMENTS
    + 1000000 * ctypes.sizeof(ProductStruct)
    + 1000 * ctypes.sizeof(PartialWeightStruct)
    + sum(map(ctypes.sizeof, (RowLookup, RoutingStruct, ExpertProducts, CachedMixture, ExpertHint)))
)


_NUMBERS = (c_int64,) * 3
_NODE = (c_void_p, c_int, c_int, c_void_p)
FUNCTIONS: Prototypes = {
    **{
        f"hetrun_products_{name}": (c_int64, *_NUMBERS)
        for name in ("takes", "packed", "scratch", "unit", "shared")
    },
    **{f"hetrun_{name}": (None, *_NODE) for name in ("product", "lookup", "route", "expert_products")},
}
PACKING: Prototypes = {"hetrun_products_pack": (None, *_NUMBERS, c_void_p, c_void_p, c_int64)}


class MatmulLibrary:
    """The library's functions."""

    def __init__(self, dll: ctypes.CDLL, unlocked: ctypes.CDLL) -> None:
        declare(dll, FUNCTIONS)
        self._takes, self._packed = dll.hetrun_products_takes, dll.hetrun_products_packed
        self._scratch, self._unit = dll.hetrun_products_scratch, dll.hetrun_products_unit
        self._shared = dll.hetrun_products_shared
        # Packing takes milliseconds, and needs nothing of Python's.
        self._pack = declare(unlocked, PACKING)["hetrun_products_pack"]
        self.multiply, self.look_up = dll.hetrun_product, dll.hetrun_lookup
        self.product_address, self.lookup_address = address_of(self.multiply), address_of(self.look_up)
        self.route, self.multiply_experts = dll.hetrun_route, dll.hetrun_expert_products
        self.route_address = address_of(self.route)
        self.experts_address = address_of(self.multiply_experts)
        self.mixture_address = address_of(dll.hetrun_cached_mixture)
        self.hint_address = address_of(dll.hetrun_expert_hint)
        self.want_address = address_of(dll.hetrun_want_experts)
        self.level: int = dll.hetrun_products_level()
        # All that this CPU could use, the best last.
        self.levels = tuple(level for level in range(len(LEVELS)) if dll.hetrun_products_runs(level))

    @property
    def instructions(self) -> str:
        """What it uses of this CPU."""
        return LEVELS[self.level]

    def takes(self, ggml_id: int, shape: tuple[int, int]) -> bool:
        """Whether it can hold a weight of this type and shape."""
        return bool(self._takes(ggml_id, *shape))

    def packed_bytes(self, ggml_id: int, shape: tuple[int, int]) -> int:
        """Memory of a packed weight."""
        size: int = self._packed(ggml_id, *shape)
        return size

    def pack(
        self, ggml_id: int, shape: tuple[int, int], stored: NDArray[np.uint8], packed: NDArray[np.uint8]
    ) -> None:
        """From the blocks of a file to the layout of the products; whole groups of rows, or the last rows."""
        assert packed.nbytes == self.packed_bytes(ggml_id, shape)
        self._pack(ggml_id, *shape, stored.ctypes.data, packed.ctypes.data, self.level)

    def scratch(self, ggml_id: int, n: int, cols: int) -> int:
        """Bytes that each thread works in, for `n` rows."""
        size: int = self._scratch(ggml_id, n, cols)
        return size

    def unit(self, ggml_id: int, cols: int, halves: int) -> int:
        """Bytes besides, for a weight that is not always in memory as a whole, with or without a gate."""
        size: int = self._unit(ggml_id, cols, halves)
        return size

    def shared(self, ggml_id: int, n: int, cols: int) -> int:
        """Bytes that all threads share for such a weight."""
        size: int = self._shared(ggml_id, n, cols)
        return size


def products() -> MatmulLibrary | None:
    """The library, where it multiplies faster than ggml does."""
    found = library()
    return found if found and found.level != PORTABLE else None


@cache
def library() -> MatmulLibrary | None:
    """The library, where it was built, and from the sources that this file goes with."""
    path = Path(__file__).parent / NAME
    dll = load_built(path, ("hetrun_products_layout", LAYOUT), locked=True)
    return MatmulLibrary(dll, load_library(path)) if dll else None
