"""Attention: the scores of some query rows over all keys as tiles, then their shares of the values."""

from __future__ import annotations

import numba
import numpy as np

from hetrun.backend import Floats, Pass
from hetrun.graph import Op
from hetrun.graph.ops import Attention
from hetrun.memory.kv.cache import KvCache, KvTable
from hetrun.memory.kv.paged_allocator import KvView
from hetrun_numba.compiling import compiled, inlined
from hetrun_numba.formats import COLUMNS, NUMBER, STEPS, Ints, up_to
from hetrun_numba.products import one_tile
from hetrun_numba.rows import exp
from hetrun_numba.tile import HEIGHTS, TALLEST


@compiled("void(float32[:, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], boolean)", parallel=True)
def _lay_out(x: Floats, panels: Floats, columns: Floats, by_rows: bool) -> None:
    """Rows [row, head, column] as panels: of 32 rows for scores, or of 32 columns for sums of rows."""
    for head in numba.prange(x.shape[1]):
        for row in range(x.shape[0]):
            for k in range(x.shape[2]):
                if by_rows:
                    panels[head, row // COLUMNS, k, row % COLUMNS] = x[row, head, k]
                else:
                    columns[head, k // COLUMNS, row, k % COLUMNS] = x[row, head, k]


@inlined
def _share(scores: Floats, a: int, b: int, shares: Floats) -> np.float32:
    """e to the scores from a to b, and the sum of them; what is not seen has no share."""
    most, total = np.float32(-np.inf), np.float32(0)
    for k in range(a, b):
        most = max(most, scores[k])
    for k in range(a, b):
        scores[k] = exp(scores[k] - most)
    for k in range(a, b):
        total += scores[k]
        shares[k] = scores[k]
    return total


@compiled(
    "void(float32[:, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], int64[::1], int64, float64,"
    " float32[:, :, ::1])",
    parallel=True,
)
def _attend(
    q: Floats, keys: Floats, values: Floats, ends: Ints, window: int, scale: float, out: Floats
) -> None:
    """One sequence. q and out are [row, head, column]; row i sees the keys before ends[i], or a window."""
    group, heads = q.shape[1] // keys.shape[0], keys.shape[0]
    rows, steps, slabs = q.shape[0] * group, keys.shape[2], values.shape[1]
    blocks = (rows + TALLEST - 1) // TALLEST
    for job in numba.prange(blocks * heads):
        # The last rows see most: they come first.
        head, block = job % heads, blocks - 1 - job // heads
        first = block * TALLEST
        n = min(TALLEST, rows - first)
        height = TALLEST
        for h in HEIGHTS:
            if h >= n and h < height:
                height = h
        begin = max(0, ends[first // group] - window) // COLUMNS if window else 0
        end = (ends[(first + n - 1) // group] + COLUMNS - 1) // COLUMNS
        x = np.zeros((steps, height), np.float32)
        for i in range(n):
            token, which = (first + i) // group, head * group + (first + i) % group
            for k in range(q.shape[2]):
                x[k, i] = q[token, which, k] * np.float32(scale)
        seen = (end - begin) * COLUMNS
        scores = np.zeros((height, seen), np.float32)
        for panel in range(begin, end):
            to = scores.ctypes.data + (panel - begin) * COLUMNS * NUMBER
            one_tile(height, x.ctypes.data, keys[head, panel].ctypes.data, steps, to, seen * NUMBER)
        shares = np.zeros((seen, height), np.float32)
        sums = np.zeros(TALLEST, np.float32)
        for i in range(n):
            b = ends[(first + i) // group]
            a = max(0, b - window) if window else 0
            a, b = a - begin * COLUMNS, b - begin * COLUMNS
            sums[i] = _share(scores[i], a, b, shares[:, i])
        found = np.zeros((height, slabs * COLUMNS), np.float32)
        for slab in range(slabs):
            w = values[head, slab, begin * COLUMNS :].ctypes.data
            to = found.ctypes.data + slab * COLUMNS * NUMBER
            one_tile(height, shares.ctypes.data, w, seen, to, slabs * COLUMNS * NUMBER)
        for i in range(n):
            token, which = (first + i) // group, head * group + (first + i) % group
            for k in range(q.shape[2]):
                out[token, which, k] = found[i, k] / sums[i]


def _read(table: KvTable, view: KvView) -> Floats:
    """The rows of a sequence, [row, head, column]."""
    flat = table.quant.dequantise(table.raw[view.first : view.end], table.n_heads * table.head_dim)
    return flat.reshape(view.length, table.n_heads, table.head_dim)


def attention(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    a = op.attrs
    assert isinstance(a, Attention)
    q, k, v = x
    keys, values = kv.heads(a.layer, a.first, a.n_kv_heads)
    group = kv.group(a.layer)
    keys.write(work.slots[group], k)
    values.write(work.slots[group], v)
    q = np.ascontiguousarray(q).reshape(-1, a.n_heads, a.head_dim)
    out = np.empty_like(q)
    for part in work.parts:
        view, n = part.kv[group], part.b - part.a
        if op.rows == "tokens":
            here, own = slice(part.a, part.b), np.arange(n)
        else:
            here = slice(part.wanted_a, part.wanted_b)
            own = work.wanted[here] - part.a
        if len(own):
            ends = (own + view.length - n + 1).astype(np.int64)
            _one(a, q[here], _read(keys, view), _read(values, view), ends, out[here])
    return out.reshape(len(q), op.out.width)


def _one(a: Attention, q: Floats, keys: Floats, values: Floats, ends: Ints, out: Floats) -> None:
    """One sequence, its keys and values laid out for tiles."""
    n = up_to(len(keys), COLUMNS)
    none = np.empty((0, 0, 0, 0), np.float32)
    by_rows = np.zeros((a.n_kv_heads, n // COLUMNS, up_to(a.head_dim, STEPS), COLUMNS), np.float32)
    by_columns = np.zeros((a.n_kv_heads, up_to(a.head_dim, COLUMNS) // COLUMNS, n, COLUMNS), np.float32)
    _lay_out(keys, by_rows, none, True)
    _lay_out(values, none, by_columns, False)
    _attend(q, by_rows, by_columns, ends, a.window, a.scale, out)
