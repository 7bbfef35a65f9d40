"""How products are given to kernels: sizes that the sources name as well."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_int, c_void_p

from hetrun.backends.cuda.programs import Source

WARPS = 4  # of a block
THREADS = 32 * WARPS
GROUPS = {1: 2, 2: 2, 4: 4, 8: 4}  # tokens that a warp takes at once, and rows
INT8_ROWS = 2  # the same rows for any of them, where inputs are bytes
# Types of weights that are multiplied by bytes where results need not be exact.
INT8_TYPES = frozenset(("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"))
ROUNDED = 32  # numbers of an input that share a scale


class MatmulOutput(Structure):
    """A matrix of a launch, and where its results go."""

    _fields_ = (
        ("w", c_void_p),
        ("bias", c_void_p),
        ("add", c_void_p),
        ("y", c_void_p),
        ("rows", c_int),
        ("ldy", c_int),
    )


def three(outputs: Sequence[MatmulOutput]) -> tuple[MatmulOutput, MatmulOutput, MatmulOutput]:
    """As many matrices as a launch has; those that are not there have no rows."""
    first, second, third = (*outputs, MatmulOutput(), MatmulOutput())[:3]
    return first, second, third


def source(quant: str, int8: bool = False) -> Source:
    """The products with weights of a type, and with inputs that are floats or bytes."""
    return Source("products", (("QUANT", quant), *([("INT8", "int8")] if int8 else [])))


def takes_int8(quant: str, cols: int) -> bool:
    """Whether there are products of such weights and bytes."""
    return quant in INT8_TYPES and cols % ROUNDED == 0


def group_of(tokens: int) -> int:
    """Tokens that a warp takes at once, of this many."""
    return next((group for group in GROUPS if tokens <= group), 8)


def blocks(tokens: int, *rows: int, int8: bool = False) -> int:
    """Blocks of a launch for `tokens` tokens, and for matrices of these numbers of rows."""
    group = group_of(tokens)
    at_once = WARPS * (INT8_ROWS if int8 else GROUPS[group])
    return -(-tokens // group) * sum(-(-n // at_once) for n in rows)


def int8_row(cols: int) -> int:
    """Bytes from a row of rounded inputs to the next: a number is one, and each 32 have a scale and a sum."""
    return -(-(cols + cols // ROUNDED * 8) // 16) * 16
