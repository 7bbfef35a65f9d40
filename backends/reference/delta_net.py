"""A short convolution over time and the gated delta rule, in numpy: token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hetrun.backend import Floats, Pass, SequencePart
from hetrun.backends.reference.activations import silu
from hetrun.graph import Op
from hetrun.graph.ops import CausalConv, DeltaNet
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.kv.states import NONE


def causal_conv(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    a = op.attrs
    assert isinstance(a, CausalConv)
    out = np.empty_like(x[0])
    bias = w[1][:, 0] if len(w) > 1 else None

    def convolve(part: SequencePart, tail: Floats) -> Iterator[Floats]:
        rows = tail.reshape(a.kernel - 1, a.width)
        for i in range(part.a, part.b):
            rows = np.concatenate((rows, x[0][i : i + 1]))
            found = np.einsum("kc,ck->c", rows, w[0])
            if bias is not None:
                found += bias
            out[i] = silu(found) if a.silu else found
            rows = rows[1:]
            yield rows

    _go_through(work, kv.state(a.layer, op.kind), convolve)
    return out


def delta_net(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    a = op.attrs
    assert isinstance(a, DeltaNet)
    q, k, v = heads(a, x[0])
    decay = -np.exp(w[0]) if a.log else w[0]
    with np.errstate(over="ignore"):
        g = np.exp(decay * np.logaddexp(np.float32(0), x[1] + w[1]))
        beta = np.logaddexp(np.float32(0), x[2] + w[1]) if a.mamba else 1 / (1 + np.exp(-x[2]))
    out = np.empty((len(v), a.v_heads, a.v_dim), np.float32)

    def remember(part: SequencePart, before: Floats) -> Iterator[Floats]:
        state = before.reshape(a.v_heads, a.v_dim, a.row).copy()
        known = state[..., : a.k_dim]
        for i in range(part.a, part.b):
            known *= g[i, :, None, None]
            missing = v[i] if a.mamba else v[i] - np.einsum("hvk,hk->hv", known, k[i])
            known += (missing * beta[i, :, None])[:, :, None] * k[i][:, None, :]
            out[i] = np.einsum("hvk,hk->hv", known, q[i])
            if a.mamba:
                out[i] += w[2][0][:, None] * v[i]
            yield state

    _go_through(work, kv.state(a.layer, op.kind), remember)
    return out.reshape(len(v), a.v_width)


def heads(a: DeltaNet, x: Floats) -> tuple[Floats, Floats, Floats]:
    """q, k and v as [rows, heads of v, columns], q and k as they are multiplied."""
    widths = (a.k_width, a.k_width, a.v_width)
    q, k, v = (x[:, at : at + width] for at, width in zip(a.columns, widths, strict=True))
    times = a.v_heads // a.k_heads
    of = np.arange(a.v_heads) % a.k_heads if a.tiled else np.arange(a.v_heads) // times

    def normed(rows: Floats) -> Floats:
        each = rows.reshape(len(rows), a.k_heads, a.k_dim)
        if a.mamba:
            return each[:, of]
        length = np.sqrt(np.square(each).sum(axis=-1, keepdims=True) + np.float32(a.eps))
        found: Floats = (each / length)[:, of]
        return found

    scale = np.float32(1 if a.mamba else a.k_dim**-0.5)
    return normed(q) * scale, normed(k), v.reshape(len(v), a.v_heads, a.v_dim)


def _go_through(work: Pass, table: Floats, step: Callable[[SequencePart, Floats], Iterator[Floats]]) -> None:
    """Each sequence from the state that it has, token by token; states are written where the pass says."""
    for part in work.parts:
        assert part.states is not None
        read, write = part.states.read, part.states.write
        before = np.zeros_like(table[0]) if read == NONE else table[read].copy()
        for slot, state in zip(write.tolist(), step(part, before), strict=True):
            if slot != NONE:
                table[slot] = state.reshape(-1)
