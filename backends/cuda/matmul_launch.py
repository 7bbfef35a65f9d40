"""How products are given to kernels: sizes that the sources name as well."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_int, c_void_p

WARPS = 4  # of a block
THREADS = 32 * WARPS
GROUPS = {1: 2, 2: 2, 4: 4, 8: 4}  # tokens that a warp takes at once, and rows


class Output(Structure):
    """A matrix of a launch, and where its results go."""

    _fields_ = (
        ("w", c_void_p),
        ("bias", c_void_p),
        ("add", c_void_p),
        ("y", c_void_p),
        ("rows", c_int),
        ("ldy", c_int),
    )


def three(outputs: Sequence[Output]) -> tuple[Output, Output, Output]:
    """As many matrices as a launch has; those that are not there have no rows."""
    first, second, third = (*outputs, Output(), Output())[:3]
    return first, second, third


def group_of(tokens: int) -> int:
    """Tokens that a warp takes at once, of so many."""
    return next((group for group in GROUPS if tokens <= group), 8)


def blocks(tokens: int, *rows: int) -> int:
    """Blocks of a launch for so many tokens, and for matrices of so many rows."""
    group = group_of(tokens)
    return -(-tokens // group) * sum(-(-n // (WARPS * GROUPS[group])) for n in rows)
