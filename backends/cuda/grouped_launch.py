"""How experts of many tokens are given to kernels: sizes that the sources name as well.

`group_pairs` sorts pairs by expert and cuts them into tiles, `experts_gated_many` and `experts_down_many`
take a tile at a time. Their input is in bf16, and so is what passes between them, by sorted pairs.
"""

from __future__ import annotations

import numpy as np

from hetrun.backends.cuda.programs import Source

GROUPING = Source("grouping")
THREADS = 256
TILE = 128  # pairs of a tile at most
SHARED = 2 * 2 * (TILE + 128) * (64 + 8)  # of experts_gated_many and experts_down_many: two slabs of bf16
TILE_DTYPE = np.dtype([(name, np.int32) for name in ("expert", "begin", "count", "unused")])


def source(quant: str) -> Source:
    """The products with weights of a type."""
    return Source("tiles", (("QUANT", quant),))


def most_tiles(pairs: int, held: int) -> int:
    """Tiles that so many pairs can make at most: each expert, and nobody, may have one that is not full."""
    return min(pairs, pairs // TILE + held + 1)


def grouping_grid(held: int) -> tuple[int]:
    """Blocks of group_pairs."""
    return (held + 1,)


def grouping_shared(held: int) -> int:
    """Shared memory of a block of group_pairs."""
    return 4 * (held + 1 + THREADS // 32)


def gated_grid(pairs: int, held: int, n_ff: int) -> tuple[int]:
    """Blocks of experts_gated_many."""
    return (-(-n_ff // 64) * most_tiles(pairs, held),)


def down_grid(pairs: int, held: int, width: int) -> tuple[int]:
    """Blocks of experts_down_many."""
    return (-(-width // 128) * most_tiles(pairs, held),)
