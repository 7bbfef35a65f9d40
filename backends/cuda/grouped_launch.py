"""How experts of many tokens are given to kernels: sizes that the sources name as well.

`group_pairs` sorts pairs by expert and cuts them into tiles; one kernel makes what is between gate and down
of a tile at a time, one the results. Their input is in bf16, and so is what passes between them, by sorted
pairs; where results need not be exact both are rounded to bytes instead (`round_int8`).
"""

from __future__ import annotations

import numpy as np

from hetrun.backends.cuda.int8 import launch as int8
from hetrun.backends.cuda.programs import Source

GROUPING = Source("grouping")
THREADS = 256
TILE = 128  # pairs of a tile at most
SHARED = 2 * (2 * TILE + 128) * 64  # of the products in bf16: two slabs of the input, one of weights
GATED_INT8, DOWN_INT8 = int8.shared(TILE) + 4 * TILE, int8.shared(TILE)  # two slabs, and where rows lie
TILE_DTYPE = np.dtype([(name, np.int32) for name in ("expert", "begin", "count", "unused")])
Kernel = tuple[Source, str]


def source(quant: str, in_bytes: bool = False) -> Source:
    """The products with weights of a type."""
    return Source("int8_experts" if in_bytes else "tiles", (("QUANT", quant),))


def gated(quant: str, in_bytes: bool) -> tuple[Kernel, int]:
    """What multiplies by gate and up, and the shared memory of a block."""
    if in_bytes:
        return (source(quant, in_bytes), "experts_gated_int8"), GATED_INT8
    return (source(quant), "experts_gated_many"), SHARED


def down(quant: str, in_bytes: bool) -> tuple[Kernel, int]:
    """The same of down."""
    if in_bytes:
        return (source(quant, in_bytes), "experts_down_int8"), DOWN_INT8
    return (source(quant), "experts_down_many"), SHARED


def most_tiles(pairs: int, held: int) -> int:
    """The most tiles that pairs can make: each expert, and those without one, may have a tile not full."""
    return min(pairs, pairs // TILE + held + 1)


def grouping_grid(held: int) -> tuple[int]:
    """Blocks of group_pairs."""
    return (held + 1,)


def grouping_shared(held: int) -> int:
    """Shared memory of a block of group_pairs."""
    return 4 * (held + 1 + THREADS // 32)


def gated_grid(pairs: int, held: int, n_ff: int) -> tuple[int]:
    """Blocks of the products with gate and up."""
    return (-(-n_ff // 64) * most_tiles(pairs, held),)


def down_grid(pairs: int, held: int, width: int) -> tuple[int]:
    """Blocks of the product with down."""
    return (-(-width // 128) * most_tiles(pairs, held),)
