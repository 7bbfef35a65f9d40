"""Weights as the kernels want them: panels of 32 rows, the codes of a column next to each other.

So a vector of a product holds 32 results, and whatever is done to a code is done to 32 of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import FLOAT_BYTES, Floats, ReadInto
from hetrun.graph import Weight
from hetrun_numba.formats import BLOCKS, COLUMNS, STEPS, Blocks, Ints, small_scales, up_to

Bytes = NDArray[np.uint8]
READ = 16 << 20  # bytes of a file at a time


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix [rows, cols] of a quantised type."""

    rows: int
    cols: int
    blocks: Blocks
    codes: Bytes  # [panel, group of columns, row]: as many columns' codes as a byte has room for
    high: Bytes  # one more bit of each, or nothing
    scales: Floats  # [panel, block, row]
    least: Floats  # the same, or nothing
    form: Ints

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.codes.nbytes + self.high.nbytes + self.scales.nbytes + self.least.nbytes


@dataclass(frozen=True, slots=True)
class FloatPanels:
    """A matrix [rows, cols] of float32 numbers."""

    rows: int
    cols: int
    numbers: Floats  # [panel, column, row]

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.numbers.nbytes


def packed_bytes(weight: Weight) -> int:
    """Memory that a matrix will take."""
    rows, cols = up_to(weight.shape[0], COLUMNS), weight.shape[1]
    if weight.quant.name == "F32":
        return rows * up_to(cols, STEPS) * FLOAT_BYTES
    blocks = BLOCKS[weight.quant.name]
    bits = blocks.bits + (blocks.high_place is not None)
    numbers = 1 + (blocks.least_at >= 0)
    return rows * cols * bits // 8 + rows * (cols // blocks.size) * numbers * FLOAT_BYTES


def pack(weight: Weight, read: ReadInto) -> Panels | FloatPanels:
    """Read a matrix and lay it out anew, some panels at a time."""
    panels = up_to(weight.shape[0], COLUMNS) // COLUMNS
    width = weight.quant.row_bytes(weight.shape[1])
    step = max(1, READ // (width * COLUMNS)) * COLUMNS
    made: Panels | FloatPanels
    if weight.quant.name == "F32":
        steps = up_to(weight.shape[1], STEPS)
        made = FloatPanels(*weight.shape, np.zeros((panels, steps, COLUMNS), np.float32))
    else:
        made = _empty(weight, panels)
    for a in range(0, weight.shape[0], step):
        b = min(a + step, weight.shape[0])
        # Rows that fill up the last panel are zero bytes: their results are never looked at.
        raw = np.zeros((up_to(b - a, COLUMNS), width), np.uint8)
        read(weight.rows(a, b), raw[: b - a].reshape(-1))
        if isinstance(made, Panels):
            _pack_codes(made, weight, a // COLUMNS, raw)
        else:
            numbers = raw.view(np.float32).reshape(-1, COLUMNS, weight.shape[1])
            first = a // COLUMNS
            made.numbers[first : first + len(numbers), : weight.shape[1]] = numbers.transpose(0, 2, 1)
    return made


def _empty(weight: Weight, panels: int) -> Panels:
    blocks, cols = BLOCKS[weight.quant.name], weight.shape[1]
    high = cols // 8 if blocks.high_place is not None else 0
    n_blocks = cols // blocks.size
    least = n_blocks if blocks.least_at >= 0 else 0
    return Panels(
        *weight.shape,
        blocks,
        np.empty((panels, cols * blocks.bits // 8, COLUMNS), np.uint8),
        np.empty((panels, high, COLUMNS), np.uint8),
        np.empty((panels, n_blocks, COLUMNS), np.float32),
        np.empty((panels, least, COLUMNS), np.float32),
        blocks.form,
    )


def _pack_codes(made: Panels, weight: Weight, first: int, raw: Bytes) -> None:
    """Rows of the file from panel `first` on."""
    from hetrun_numba.products import pack_bits, pack_threes

    b, n, size = made.blocks, len(raw) // COLUMNS, weight.quant.block_bytes
    here = slice(first, first + n)
    if b.factor is None:
        pack_bits(raw, size, b.place, b.shift, b.bits, made.codes[here])
    else:
        pack_threes(raw, size, b.place, b.factor, made.codes[here])
    if b.high_place is not None and b.high_shift is not None:
        pack_bits(raw, size, b.high_place, b.high_shift, 1, made.high[here])
    blocks = raw.reshape(n, COLUMNS, -1, size)
    if b.fp4:
        scales = small_scales(weight.quant.name)[blocks[..., :4]].reshape(n, COLUMNS, -1)
    else:
        scales = _halves(blocks, b.scale_at) * np.float32(b.scale_factor)
    made.scales[here] = scales.transpose(0, 2, 1)
    if b.least_at >= 0:
        made.least[here] = _halves(blocks, b.least_at).transpose(0, 2, 1)


def _halves(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block."""
    found: Floats = np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)
    return found
