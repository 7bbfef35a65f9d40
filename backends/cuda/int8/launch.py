"""How products of many tokens in bytes are given to kernels: sizes that the sources name as well.

The input is rounded as for few tokens (`round_int8`), weights are read as they lie in their file, and tensor
cores multiply bytes. Nothing of it runs where results are to be exact.
"""

from __future__ import annotations

from ctypes import Structure, c_int, c_void_p

from hetrun.backends.cuda.driver import Device
from hetrun.backends.cuda.matmul_launch import int8_row
from hetrun.backends.cuda.programs import Source

TYPES = frozenset(
    (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("IQ4_NL", "IQ4_XS", "MXFP4"),
    )
)
SLAB = 64  # columns that a block multiplies at once
TILES = 128, 64  # rows of weights, and tokens, of a block
SLAB_ROW = 2 * (80 + 2 * 8)  # bytes of a row of the input and one of weights in a slab, and their scales
LARGEST = 1 << 31  # bytes of an input: kernels count them in 32 bits
# Chips that multiply bf16 at their full rate with sums in float32. On these cuBLAS is faster for long passes:
# by the instructions that a product takes here, and the bytes that unpacking moves, from some 200 tokens on.
# It has not been measured. On others, GeForce among them, bf16 has a quarter of the rate of bytes.
FULL_RATE = frozenset(((8, 0), (9, 0), (10, 0), (10, 3)))
FEW_ENOUGH, ANY = 256, 1 << 30


class Input(Structure):
    """Rows, rounded."""

    _fields_ = (("rows", c_void_p), ("tokens", c_int), ("cols", c_int))


def source(quant: str) -> Source:
    """The products with weights of a type."""
    return Source("int8_products", (("QUANT", quant),))


def most_rows(device: Device) -> int:
    """Rows of a pass up to which weights are read as they lie; with more, unpacking them costs less."""
    return FEW_ENOUGH if device.capability in FULL_RATE else ANY


def takes(quant: str, tokens: int, cols: int) -> bool:
    """Whether there are kernels for this many tokens, and weights of a type in rows of `cols` columns."""
    return quant in TYPES and cols % SLAB == 0 and tokens * int8_row(cols) < LARGEST


def tile(tokens: int, processors: int, *rows: int) -> int:
    """Rows of a tile: the larger one where that leaves work for all processors."""
    large, small = TILES
    return large if tokens > small and blocks(large, tokens, *rows) >= processors else small


def blocks(size: int, tokens: int, *rows: int) -> int:
    """Blocks of a launch for `tokens` tokens, and for matrices of these numbers of rows."""
    return -(-tokens // size) * sum(-(-n // size) for n in rows)


def gated_blocks(size: int, tokens: int, rows: int) -> int:
    """The same of gates: a block has half a tile of either matrix."""
    return -(-tokens // size) * -(-rows // (size // 2))


def threads(size: int) -> int:
    """Threads of a block."""
    return 2 * size


def shared(size: int) -> int:
    """Shared memory of a block: two slabs."""
    return 2 * size * SLAB_ROW
