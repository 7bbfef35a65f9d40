"""Mixture of experts, in numpy."""

from __future__ import annotations

import numpy as np

from hetrun.backend import Floats, Pass
from hetrun.graph import Op
from hetrun.graph.ops import Moe
from hetrun.memory.kv.cache import KvCache


def moe(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    a = op.attrs
    assert isinstance(a, Moe)
    router, *others = w
    gate, up, down = (m.reshape(a.matrices, -1, m.shape[1]) for m in others)
    chosen, shares = route(a, x[0] @ router.T)
    if work.chosen and not a.held:
        work.chosen(op.weights[0].name, chosen)
    out = np.zeros_like(x[0])
    for expert in range(a.matrices):
        rows, place = np.nonzero(chosen == a.first + expert)
        if not len(rows) or expert in a.without:
            continue
        mine = x[0][rows]
        inner = silu(mine @ gate[expert].T) * (mine @ up[expert].T)
        out[rows] += shares[rows, place, None] * (inner @ down[expert].T)
    return out


def route(a: Moe, scores: Floats) -> tuple[np.ndarray, Floats]:
    """For each row its experts, best first, and the share that each has in the result."""
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-scores, axis=-1, kind="stable")[:, : a.n_used]
    shares = np.take_along_axis(p, chosen, axis=-1)
    if a.normalise:
        shares /= shares.sum(axis=-1, keepdims=True)
    return chosen, shares * np.float32(a.scale)


def silu(x: Floats) -> Floats:
    """x * sigmoid(x)."""
    # exp overflows to inf for very negative x, and x / inf is the 0 that silu has there.
    with np.errstate(over="ignore"):
        out: Floats = x / (1 + np.exp(-x))
        return out
