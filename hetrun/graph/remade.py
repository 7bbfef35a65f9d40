"""Rows that a file has in another form than graphs want them: they are made when they are read.

They cannot be mapped, and no ring of buffers reads them ahead; `hetrun convert` writes a file that has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetrun.graph import Extent, ReadExtent, Remade, Weight
from hetrun.graph.quant import by_name

Bytes = NDArray[np.uint8]
MXFP4 = by_name("MXFP4")
HALF = 16  # bytes of a block's 32 weights


@dataclass(frozen=True, slots=True)
class TransposedColumns(Remade):
    """Columns of a matrix, each of them a row: every `step`-th one from `first` on."""

    matrix: Extent
    number: int  # bytes of one number
    first: int
    step: int
    count: int

    @property
    def rows(self) -> int:
        return self.count

    @property
    def row_bytes(self) -> int:
        return self.matrix.rows * self.number

    @property
    def sources(self) -> tuple[Extent, ...]:
        return (self.matrix,)

    def slice(self, a: int, b: int) -> TransposedColumns:
        return replace(self, first=self.first + a * self.step, count=b - a)

    def make(self, read: ReadExtent) -> Bytes:
        numbers = read(self.matrix).reshape(self.matrix.rows, -1, self.number)
        columns = numbers[:, self.first : self.first + self.count * self.step : self.step]
        return np.ascontiguousarray(columns.transpose(1, 0, 2)).reshape(self.count, self.row_bytes)


@dataclass(frozen=True, slots=True)
class Mxfp4Rows(Remade):
    """Rows of MXFP4 whose numbers and scales are tensors of their own, and where neighbours share a byte."""

    numbers: Extent
    scales: Extent

    @property
    def rows(self) -> int:
        return self.numbers.rows

    @property
    def row_bytes(self) -> int:
        return self.numbers.row_bytes + self.scales.row_bytes

    @property
    def sources(self) -> tuple[Extent, ...]:
        return (self.numbers, self.scales)

    def slice(self, a: int, b: int) -> Mxfp4Rows:
        return Mxfp4Rows(*(_rows(extent, a, b) for extent in self.sources))

    def make(self, read: ReadExtent) -> Bytes:
        pairs = read(self.numbers).reshape(-1, HALF)
        out = np.empty((len(pairs), 1 + HALF), np.uint8)
        out[:, 0] = read(self.scales).reshape(-1)
        low, high = pairs & 15, pairs >> 4  # of numbers 0, 2, ... and 1, 3, ...
        # GGUF's bytes have number i and number i + 16.
        out[:, 1::2] = low[:, : HALF // 2] | low[:, HALF // 2 :] << 4
        out[:, 2::2] = high[:, : HALF // 2] | high[:, HALF // 2 :] << 4
        return out.reshape(self.rows, self.row_bytes)


def _rows(extent: Extent, a: int, b: int) -> Extent:
    return replace(extent, offset=extent.offset + a * extent.stride, rows=b - a)


def one_extent(weight: Weight) -> Extent:
    """Where all of a weight lies."""
    (found,) = weight.parts
    if not isinstance(found, Extent):
        raise ValueError(f"{weight.name} does not lie in a file as it is")
    return found


def turned(weight: Weight, matrices: int, first: int = 0, step: int = 1) -> Weight:
    """The columns of matrices on top of each other as the rows of others, or every `step`-th of them."""
    whole, (rows, cols) = one_extent(weight), weight.shape
    if rows % matrices or cols % step:
        raise ValueError(f"{weight.name} is {rows} x {cols}, which is no {matrices} matrices")
    each, count = rows // matrices, cols // step
    number = weight.quant.row_bytes(1)
    parts = tuple(
        TransposedColumns(_rows(whole, i * each, (i + 1) * each), number, first, step, count)
        for i in range(matrices)
    )
    return replace(weight, shape=(matrices * count, each), parts=parts)


def every_second_row(weight: Weight, first: int) -> Weight:
    """Every second row of MXFP4, from the first or the second on."""
    (whole,), rows = weight.parts, weight.shape[0] // 2
    if not isinstance(whole, Mxfp4Rows):
        raise ValueError(f"{weight.name} is not MXFP4 in two tensors")
    half = Mxfp4Rows(*(_every_second(extent, first) for extent in whole.sources))
    return replace(weight, shape=(rows, weight.shape[1]), parts=(half,))


def _every_second(extent: Extent, first: int) -> Extent:
    offset = extent.offset + first * extent.stride
    return replace(extent, offset=offset, rows=extent.rows // 2, stride=2 * extent.stride)


def every_second_column(weight: Weight, first: int) -> Weight:
    """Every second column, from the first or the second on."""
    whole, (rows, cols), number = one_extent(weight), weight.shape, weight.quant.row_bytes(1)
    if cols % 2:
        raise ValueError(f"{weight.name} has {cols} columns, which are no pairs")
    pairs = [
        Extent(whole.path, whole.offset + i * whole.stride, cols // 2, 2 * number, 2 * number, whole.stamp)
        for i in range(rows)
    ]
    parts = tuple(TransposedColumns(pair, number, first, 1, 1) for pair in pairs)
    return replace(weight, shape=(rows, cols // 2), parts=parts)


def mxfp4(numbers: Weight, scales: Weight, rows: int) -> Weight:
    """`rows` rows of two tensors of bytes."""
    (of_numbers, of_scales) = (_as_rows(one_extent(w), w, rows) for w in (numbers, scales))
    if of_numbers.row_bytes != HALF * of_scales.row_bytes:
        raise ValueError(f"{numbers.name} has {of_numbers.row_bytes} bytes for {of_scales.row_bytes} scales")
    part = Mxfp4Rows(of_numbers, of_scales)
    return Weight(numbers.name, (rows, of_scales.row_bytes * 2 * HALF), MXFP4, (part,))


def _as_rows(whole: Extent, weight: Weight, rows: int) -> Extent:
    """Bytes that follow each other, cut into `rows` rows."""
    size, rest = divmod(whole.rows * whole.row_bytes, rows)
    if rest:
        raise ValueError(f"{weight.name} cannot be cut into {rows} rows")
    return replace(whole, rows=rows, row_bytes=size, stride=size)
