"""Products: weights are unpacked a piece at a time, into a core's cache, and multiplied from there."""

from __future__ import annotations

import numba
import numpy as np

from hetrun.backend import Floats
from hetrun_numba.codes import five_bits, five_bits_and_least, one_bit, small_floats, two_bits
from hetrun_numba.compiling import compiled, inlined
from hetrun_numba.formats import COLUMNS, NUMBER, STEPS, Ints, up_to
from hetrun_numba.packing import Bytes, FloatPanels, Panels
from hetrun_numba.tile import HEIGHTS, TALLEST, TILES

CHUNK = 256  # columns that are unpacked at a time: 32 KB, and every block of weights ends with one
tile_a, tile_b, tile_c, tile_d, tile_e = (TILES[height] for height in HEIGHTS)


@compiled("void(uint8[:, ::1], int64, int64[::1], int64[::1], int64, uint8[:, :, ::1])", parallel=True)
def pack_bits(raw: Bytes, size: int, place: Ints, shift: Ints, bits: int, out: Bytes) -> None:
    """Codes of rows of a file as panels have them."""
    per_byte, mask, block = 8 // bits, (1 << bits) - 1, len(place)
    for p in numba.prange(out.shape[0]):
        for group in range(out.shape[1]):
            for row in range(COLUMNS):
                byte = 0
                for i in range(per_byte):
                    k = group * per_byte + i
                    stored = raw[p * COLUMNS + row, k // block * size + place[k % block]]
                    byte |= ((stored >> shift[k % block]) & mask) << (i * bits)
                out[p, group, row] = byte


@compiled("void(uint8[:, ::1], int64, int64[::1], int64[::1], uint8[:, :, ::1])", parallel=True)
def pack_threes(raw: Bytes, size: int, place: Ints, factor: Ints, out: Bytes) -> None:
    """The same where a byte holds five numbers of three, as digits behind the point."""
    block = len(place)
    for p in numba.prange(out.shape[0]):
        for group in range(out.shape[1]):
            for row in range(COLUMNS):
                byte = 0
                for i in range(4):
                    k = group * 4 + i
                    stored = raw[p * COLUMNS + row, k // block * size + place[k % block]]
                    byte |= ((((stored * factor[k % block]) & 255) * 3) >> 8) << (i * 2)
                out[p, group, row] = byte


@compiled("void(float32[:, :], int64, int64, float32[::1])", parallel=True)
def spread_rows(x: Floats, rest: int, steps: int, out: Floats) -> None:
    """Blocks of TALLEST rows, and one of `rest`, as tiles want them: the numbers of a column side by side."""
    full = x.shape[0] // TALLEST
    for block in numba.prange(full + (rest > 0)):
        height = TALLEST if block < full else rest
        first, at = block * TALLEST, block * TALLEST * steps
        for row in range(height):
            if first + row < x.shape[0]:
                for k in range(x.shape[1]):
                    out[at + k * height + row] = x[first + row, k]
                for k in range(x.shape[1], steps):
                    out[at + k * height + row] = 0
            else:
                for k in range(steps):
                    out[at + k * height + row] = 0


@inlined
def one_tile(height: int, x: int, w: int, steps: int, to: int, stride: int) -> None:
    """The tile of this height, which is one of HEIGHTS, or 0."""
    if height == HEIGHTS[0]:
        tile_a(x, w, steps, to, stride)
    elif height == HEIGHTS[1]:
        tile_b(x, w, steps, to, stride)
    elif height == HEIGHTS[2]:
        tile_c(x, w, steps, to, stride)
    elif height == HEIGHTS[3]:
        tile_d(x, w, steps, to, stride)
    elif height == HEIGHTS[4]:
        tile_e(x, w, steps, to, stride)


@inlined
def _tiles(
    x: int, at: tuple[int, int], rows: tuple[int, int], w: int, steps: int, to: int, stride: int
) -> None:
    """All rows by one piece of a panel: out += x.T @ w.

    x, w and `to` are addresses; `at` is the first column and how many x has in all, `rows` how many blocks of
    TALLEST there are and the height of the last one, if any.
    """
    first, cols = at
    full, rest = rows
    for block in range(full):
        tile_e(x + (block * cols + first) * TALLEST * NUMBER, w, steps, to + block * TALLEST * stride, stride)
    x += (full * cols * TALLEST + first * rest) * NUMBER
    to += full * TALLEST * stride
    one_tile(rest, x, w, steps, to, stride)


@inlined
def _unpack(
    codes: Bytes,
    high: Bytes,
    scales: Floats,
    least: Floats,
    first: int,
    form: Ints,
    centre: float,
    out: Floats,
) -> None:
    """The columns from `first` on of one panel, as numbers [column, row].

    What is in `form` stands at `Blocks.form`.
    """
    per_byte, per_block, bits, fp4 = form[0], form[1], form[2], form[3]
    middle, five, lifted = np.float32(centre), high.shape[0] > 0, least.shape[0] > 0
    for at in range(out.shape[0]):
        k = first + at
        code = codes.ctypes.data + (k >> per_byte) * COLUMNS
        shift, block = (k & ((1 << per_byte) - 1)) * bits, (k >> per_block) * COLUMNS * NUMBER
        more, bit = high.ctypes.data + (k >> 3) * COLUMNS, k & 7
        scale, low = scales.ctypes.data + block, least.ctypes.data + block
        to = out.ctypes.data + at * COLUMNS * NUMBER
        if fp4:
            small_floats(code, shift, more, bit, middle, scale, low, to)
        elif five and lifted:
            five_bits_and_least(code, shift, more, bit, middle, scale, low, to)
        elif five:
            five_bits(code, shift, more, bit, middle, scale, low, to)
        elif bits == 1:
            one_bit(code, shift, more, bit, middle, scale, low, to)
        else:
            two_bits(code, shift, more, bit, middle, scale, low, to)


@compiled(
    "void(float32[::1], int64, int64, int64, uint8[:, :, ::1], uint8[:, :, ::1], float32[:, :, ::1],"
    " float32[:, :, ::1], int64[::1], float64, float32[:, ::1])",
    parallel=True,
)
def _quantised(
    x: Floats,
    full: int,
    rest: int,
    cols: int,
    codes: Bytes,
    high: Bytes,
    scales: Floats,
    least: Floats,
    form: Ints,
    centre: float,
    out: Floats,
) -> None:
    """out += x by panels of codes."""
    stride = out.shape[1] * NUMBER
    for p in numba.prange(codes.shape[0]):
        piece = np.empty((CHUNK, COLUMNS), np.float32)
        for first in range(0, cols, CHUNK):
            steps = min(CHUNK, cols - first)
            _unpack(codes[p], high[p], scales[p], least[p], first, form, centre, piece[:steps])
            to = out.ctypes.data + p * COLUMNS * NUMBER
            _tiles(x.ctypes.data, (first, cols), (full, rest), piece.ctypes.data, steps, to, stride)


@compiled("void(float32[::1], int64, int64, float32[:, :, ::1], float32[:, ::1])", parallel=True)
def _floats(x: Floats, full: int, rest: int, panels: Floats, out: Floats) -> None:
    """out += x by panels of numbers."""
    stride, cols = out.shape[1] * NUMBER, panels.shape[1]
    for p in numba.prange(panels.shape[0]):
        for first in range(0, cols, CHUNK):
            steps = min(CHUNK, cols - first)
            piece = panels.ctypes.data + (p * cols + first) * COLUMNS * NUMBER
            to = out.ctypes.data + p * COLUMNS * NUMBER
            _tiles(x.ctypes.data, (first, cols), (full, rest), piece, steps, to, stride)


def product(x: Floats, weight: Panels | FloatPanels, bias: Floats | None) -> Floats:
    """x @ weight.T + bias."""
    n, width = len(x), up_to(weight.rows, COLUMNS)
    if not n:  # no result of this pass is wanted
        return np.empty((0, weight.rows), np.float32)
    full, left = divmod(n, TALLEST)
    rest = next((h for h in HEIGHTS if h >= left), 0) if left else 0
    cols = up_to(weight.cols, STEPS)
    spread = np.empty((full * TALLEST + rest) * cols, np.float32)
    spread_rows(x, rest, cols, spread)
    out = np.zeros((full * TALLEST + rest, width), np.float32)
    if bias is not None:
        out[:, : weight.rows] = bias
    if isinstance(weight, FloatPanels):
        _floats(spread, full, rest, weight.numbers, out)
    else:
        w = weight
        _quantised(spread, full, rest, cols, w.codes, w.high, w.scales, w.least, w.form, w.blocks.centre, out)
    return np.ascontiguousarray(out[:n, : weight.rows])
