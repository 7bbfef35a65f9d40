"""The types of weights whose products are here, and where their blocks have what.

These are types that ggml multiplies without wide kernels: a block's numbers one by one, or a few columns at a
time. Types that it has such kernels for are faster there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hetrun.graph.quant import by_name

Ints = NDArray[np.int64]
COLUMNS = 32  # results that a panel of weights makes
STEPS = 4  # columns of weights that a tile takes at a time
NUMBER = 4  # bytes


def up_to(n: int, unit: int) -> int:
    """The next multiple of it."""
    return -(-n // unit) * unit


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight is scale * (code - centre) + least, of whole numbers `code` of some bits.

    `place` and `shift` say for each weight of a block which byte has its code and where in it. One more bit
    may be in another byte. `factor` takes the place of the shift where a byte holds five numbers of three.
    """

    size: int  # weights that share a scale
    bits: int  # of a code, as it is kept: 1, 2 or 4, and one more where `high` says so
    centre: float
    place: Ints
    shift: Ints
    scale_at: int = 0
    scale_factor: float = 1.0
    least_at: int = -1  # a second float16; -1: there is none
    high_place: Ints | None = None
    high_shift: Ints | None = None
    factor: Ints | None = None
    fp4: bool = False  # codes are numbers of four bits with an exponent, scales such of eight

    @property
    def form(self) -> Ints:
        """What unpacking has to know: by how much to shift a column's number for that of its byte and of its
        block, the bits of a code, and whether codes have exponents."""
        per_byte, per_block = (8 // self.bits).bit_length() - 1, self.size.bit_length() - 1
        return np.array([per_byte, per_block, self.bits, self.fp4], np.int64)


def _runs(first: int, per_byte: int, bits: int, block: int) -> tuple[Ints, Ints]:
    """Codes that lie next to each other in bytes, the lowest bits first."""
    k = np.arange(block)
    return first + k // per_byte, k % per_byte * bits


def _halves(first: int, block: int) -> tuple[Ints, Ints]:
    """Codes of four bits: the first half of a block in the low bits of its bytes, the other in the high."""
    k = np.arange(block)
    return first + k % (block // 2), k // (block // 2) * 4


def _five(first: int, centre: float, least_at: int) -> Blocks:
    """Four bits of a code in one byte, the fifth in another."""
    place, shift = _halves(first + 4, 32)
    high_place, high_shift = _runs(first, 8, 1, 32)
    return Blocks(32, 4, centre, place, shift, 0, 1.0, least_at, high_place, high_shift)


def _ternary() -> Blocks:
    """Five numbers of three in a byte, each found by a multiplication: TQ1_0."""
    places: list[int] = []
    powers: list[int] = []
    for first, width, count in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        for power in range(count):
            places += range(first, first + width)
            powers += [3**power] * width
    nothing = np.zeros(256, np.int64)
    return Blocks(256, 2, 1.0, np.array(places), nothing, 52, factor=np.array(powers))


def _fp4() -> Blocks:
    """Four blocks of sixteen, the scales of all of them in front: NVFP4."""
    k = np.arange(64)
    place, shift = _halves(0, 16)
    return Blocks(16, 4, 0.0, 4 + k // 16 * 8 + place[k % 16], shift[k % 16], fp4=True)


BLOCKS: Mapping[str, Blocks] = {
    "Q1_0": Blocks(128, 1, 0.5, *_runs(2, 8, 1, 128), scale_factor=2.0),
    "Q2_0": Blocks(64, 2, 1.0, *_runs(2, 4, 2, 64)),
    "Q5_0": _five(2, 16.0, -1),
    "Q5_1": _five(4, 0.0, 2),
    "TQ1_0": _ternary(),
    "NVFP4": _fp4(),
}
PRODUCTS = ("F32", *BLOCKS)


@cache
def small_scales(name: str) -> NDArray[np.float32]:
    """What each byte means as a scale of NVFP4, half of it: codes count halves."""
    quant = by_name(name)
    raw = np.full((256, quant.block_bytes), 0x22, np.uint8)  # each code is 1
    raw[:, 0] = np.arange(256)
    scales: NDArray[np.float32] = quant.dequantise(raw, quant.block)[:, 0] / np.float32(2)
    return scales
