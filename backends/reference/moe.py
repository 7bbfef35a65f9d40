"""Mixture of experts, in numpy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hetrun.backend import Floats, Pass, slots_of
from hetrun.backends.reference.activations import gelu, silu
from hetrun.graph import Op
from hetrun.graph.ops import CLAMP, CLAMP_STEEPNESS, MIXTURE, Activation, Moe, MoreWeight
from hetrun.memory.kv.cache import KvCache

LEAST = np.float32(1e-20)  # of what shares are divided by


def moe(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    a = op.attrs
    assert isinstance(a, Moe)
    gate, up, down = (m.reshape(a.matrices, -1, m.shape[1]) for m in w[1:MIXTURE])
    more = a.others(w)
    chosen, shares = route(a, x[-1] @ w[0].T, more)
    if work.chosen and not a.held and (a.rest or not a.slots):
        work.chosen(op.weights[0].name, chosen)
    others = {*a.without, *(np.flatnonzero((slots_of(op, work) >= 0) == a.rest).tolist() if a.slots else ())}
    out = np.zeros_like(x[0])
    for expert in range(a.matrices):
        rows, place = np.nonzero(chosen == a.first + expert)
        if not len(rows) or expert in others:
            continue
        mine = x[0][rows]
        g, u = mine @ gate[expert].T, mine @ up[expert].T
        if "gate_bias" in more:
            g, u = g + more["gate_bias"][expert], u + more["up_bias"][expert]
        result = gated(a.activation, g, u) @ down[expert].T
        if "down_bias" in more:
            result += more["down_bias"][expert]
        out[rows] += shares[rows, place, None] * result
    return out


def route(a: Moe, scores: Floats, more: Mapping[MoreWeight, Floats]) -> tuple[np.ndarray, Floats]:
    """For each row its experts, best first, and the share that each has in the result."""
    if "router_bias" in more:
        scores = scores + more["router_bias"].ravel()
    p: Floats
    if a.scores == "sigmoid":
        p = (1 / (1 + np.exp(-scores))).astype(np.float32)
    else:
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
    liked: Floats = p + more["choice_bias"].ravel() if "choice_bias" in more else scores
    chosen = np.argsort(-of_best_groups(a, liked), axis=-1, kind="stable")[:, : a.n_used]
    shares = np.take_along_axis(p, chosen, axis=-1)
    if a.normalise:
        shares /= np.maximum(shares.sum(axis=-1, keepdims=True), LEAST)
    if "expert_scale" in more:
        shares *= more["expert_scale"].ravel()[chosen]
    return chosen, shares * np.float32(a.scale)


def of_best_groups(a: Moe, liked: Floats) -> Floats:
    """How much each expert is liked; those of the other groups never."""
    if a.groups_used == a.groups:
        return liked
    by_group = liked.reshape(len(liked), a.groups, a.n_experts // a.groups)
    worth = np.sort(by_group, axis=-1)[:, :, -a.group_best :].sum(axis=-1)
    others = np.argsort(-worth, axis=-1, kind="stable")[:, a.groups_used :]
    out = by_group.copy()
    np.put_along_axis(out, others[:, :, None], -np.inf, axis=1)
    return out.reshape(liked.shape)


def gated(activation: Activation, g: Floats, u: Floats) -> Floats:
    """What goes through an expert's last matrix."""
    if activation == "gelu":
        return gelu(g, exact=False) * u
    if activation == "silu":
        return silu(g) * u
    g, u = np.minimum(g, np.float32(CLAMP)), np.clip(u, -np.float32(CLAMP), np.float32(CLAMP))
    return silu(np.float32(CLAMP_STEEPNESS) * g) / np.float32(CLAMP_STEEPNESS) * (u + 1)
