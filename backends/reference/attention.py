"""Attention, in numpy."""

from __future__ import annotations

import numpy as np

from hetrun.backend import Floats, Pass
from hetrun.graph import Op
from hetrun.kv import KvCache
from hetrun.ops import Attention


def attention(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    assert isinstance(op.attrs, Attention)
    a = op.attrs
    q, k, v = x
    keys, values = kv.tables[a.layer]
    keys.write(work.slots, k)
    values.write(work.slots, v)
    out = np.empty((len(q), a.n_heads * a.head_dim), np.float32)
    for part in work.parts:
        rows = part.kv.rows
        if op.rows == "tokens":
            lo, hi = part.a, part.b
            seen = np.arange(hi - lo)
        else:
            lo, hi = part.wanted_a, part.wanted_b
            seen = work.wanted[lo:hi] - part.a
        if hi > lo:
            seen = seen + part.kv.length - (part.b - part.a) + 1
            out[lo:hi] = attend(a, q[lo:hi], keys.read(rows), values.read(rows), seen)
    return out


def attend(a: Attention, q: Floats, k: Floats, v: Floats, seen: np.ndarray) -> Floats:
    """One sequence: query row i sees the first seen[i] rows of k and v."""
    group = a.n_heads // a.n_kv_heads
    q = q.reshape(len(q), a.n_kv_heads, group, a.head_dim)
    hidden = np.arange(len(k))[None, :] >= seen[:, None]
    out = np.empty_like(q)
    for h in range(a.n_kv_heads):
        scores = q[:, h] @ k[:, h].T * np.float32(a.scale)  # [rows, group, seen]
        scores[np.broadcast_to(hidden[:, None, :], scores.shape)] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, h] = (scores @ v[:, h]) / scores.sum(axis=-1, keepdims=True)
    return out.reshape(len(q), a.n_heads * a.head_dim)
