"""Attention, in numpy."""

from __future__ import annotations

import numpy as np

from hetrun.backend import Floats, Ints, Pass, sees_whole
from hetrun.graph import Op
from hetrun.graph.ops import Attention
from hetrun.memory.kv.cache import KvCache


def attention(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    assert isinstance(op.attrs, Attention)
    a = op.attrs
    q, *kept = x
    keys, values = kv.heads(a.layer, a.first, a.n_kv_heads)
    group = kv.group(a.layer)
    for table, rows in zip((keys, values), kept, strict=False):
        table.write(work.slots[group], rows)
    out = np.empty((len(q), a.n_heads * a.head_dim), np.float32)
    for part in work.parts:
        view = part.kv[group]
        if op.rows == "tokens":
            lo, hi = part.a, part.b
            own = np.arange(hi - lo)
        else:
            lo, hi = part.wanted_a, part.wanted_b
            own = work.wanted[lo:hi] - part.a
        if hi > lo:
            ends = own + view.length - (part.b - part.a) + 1
            far = np.full_like(ends, view.length) if sees_whole(work.whole, a.window) else ends
            seen = keys.read(view.rows), values.read(view.rows)
            out[lo:hi] = attend(a, q[lo:hi], *seen, ends, w[0].ravel() if w else None, far)
    return out


def attend(
    a: Attention,
    q: Floats,
    k: Floats,
    v: Floats,
    ends: Ints,
    sinks: Floats | None = None,
    far: Ints | None = None,
) -> Floats:
    """One sequence: query row i sees the rows of k and v before ends[i], or a window of them; with `far` also
    those from there on, before far[i]."""
    group = a.n_heads // a.n_kv_heads
    q = q.reshape(len(q), a.n_kv_heads, group, a.head_dim)
    column, end = np.arange(len(k))[None, :], ends[:, None]
    last = end if far is None else far[:, None]
    hidden = (column >= last) | (column < end - (a.window or len(k)))
    out = np.empty_like(q)
    for h in range(a.n_kv_heads):
        scores = q[:, h] @ k[:, h].T * np.float32(a.scale)  # [rows, group, seen]
        if a.softcap:
            scores = np.float32(a.softcap) * np.tanh(scores / np.float32(a.softcap))
        scores[np.broadcast_to(hidden[:, None, :], scores.shape)] = -np.inf
        highest = scores.max(axis=-1, keepdims=True)
        if sinks is None:
            scores = np.exp(scores - highest)
            total = scores.sum(axis=-1, keepdims=True)
        else:
            mine = sinks[h * group : (h + 1) * group, None]
            highest = np.maximum(highest, mine)
            scores = np.exp(scores - highest)
            total = scores.sum(axis=-1, keepdims=True) + np.exp(mine - highest)
        out[:, h] = (scores @ v[:, h]) / total
    return out.reshape(len(q), a.n_heads * a.head_dim)
