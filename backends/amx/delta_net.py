"""The gated delta rule, and Mamba 2's: few tokens one by one, many in chunks, each sequence by itself.

So the bits of a sequence's results do not tell which others are in the pass. They tell how its text was cut:
with --deterministic a pass has one row here, and chunks are never used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from hetrun.backend import Pass
from hetrun.backends.amx.delta_chunks import ROWS, DeltaRows, by_k_heads, chunk, of_k_heads
from hetrun.backends.amx.recurrent_states import LayerStates, pieces
from hetrun.backends.amx.weight_slices import spans
from hetrun.graph import Op
from hetrun.graph.ops import DeltaNet
from hetrun.memory.kv.cache import KvCache

FEW = 4  # tokens that are faster one by one
FORGOTTEN = -60.0  # the least logarithm of a decay: nothing is left, and sums of it still have their digits


class Gates:
    """What the decays and rates of a layer hang on; `skips`: how much of v is in the result, if any is."""

    def __init__(self, a: DeltaNet, decays: Tensor, biases: Tensor, skips: Tensor | None = None) -> None:
        self._decays = -decays.exp() if a.log else decays
        self._biases = biases
        self._mamba = a.mamba
        self.skips = skips

    def of(self, decay: Tensor) -> Tensor:
        """The logarithms of each row's decays."""
        return functional.softplus(decay + self._biases).mul_(self._decays).clamp_min_(FORGOTTEN)

    def rates(self, rate: Tensor) -> Tensor:
        """How much each row teaches."""
        return functional.softplus(rate + self._biases) if self._mamba else torch.sigmoid(rate)


def delta_net(
    op: Op,
    inputs: tuple[Tensor, Tensor, Tensor],
    gates: Gates,
    work: Pass,
    kv: KvCache,
    check: Callable[[], None],
) -> Tensor:
    """Each row's result, in float32; states are written where the pass says."""
    a = op.attrs
    assert isinstance(a, DeltaNet)
    out = torch.empty(len(inputs[0]), a.v_heads, a.v_dim)
    slots, shape = LayerStates.of(kv.state(a.layer, op.kind)), (a.v_heads, a.v_dim, a.row)
    for part in work.parts:
        x, decay, rate = (value[part.a : part.b].float() for value in inputs)
        rows = _rows(a, x, gates.of(decay), gates.rates(rate))
        before = slots.before(part).view(shape)
        for lo, hi in pieces(part):
            kept = slots.after(part, hi)
            after = torch.empty(shape) if kept is None else kept.view(shape)
            own, to = rows.cut(lo, hi), out[part.a + lo : part.a + hi]
            if hi - lo <= FEW:
                _one_by_one(a, own, before, after, to)
            else:
                _in_chunks(a, own, after.copy_(before), to, check)
            before = after
        if gates.skips is not None:
            out[part.a : part.b].addcmul_(rows.v, gates.skips[:, None])
    return out.view(-1, a.v_width)


def _rows(a: DeltaNet, x: Tensor, decay: Tensor, rate: Tensor) -> DeltaRows:
    q_at, k_at, v_at = a.columns
    v = x[:, v_at : v_at + a.v_width].reshape(len(x), a.v_heads, a.v_dim)
    if a.mamba:
        both = (x[:, at : at + a.k_width].reshape(len(x), a.k_heads, a.k_dim) for at in (q_at, k_at))
        return DeltaRows(torch.stack(tuple(both), 1), v, decay, rate)
    qk = x[:, : 2 * a.k_width].view(len(x), 2, a.k_heads, a.k_dim)
    length = torch.linalg.vector_norm(qk, dim=-1, keepdim=True)
    scale = length.square_().add_(a.eps).rsqrt_()
    scale[:, 0] *= a.k_dim**-0.5
    return DeltaRows(qk * scale, v, decay, rate)


def _in_chunks(a: DeltaNet, rows: DeltaRows, state: Tensor, out: Tensor, check: Callable[[], None]) -> None:
    """The state becomes what it is after the rows."""
    for lo, hi in spans(len(rows), ROWS):
        check()
        chunk(a, rows.cut(lo, hi), state, out[lo:hi])


def _one_by_one(a: DeltaNet, rows: DeltaRows, before: Tensor, after: Tensor, out: Tensor) -> None:
    """The rule as it is written, in float32."""
    known, decays = after[..., : a.k_dim], rows.decay.exp()[:, :, None, None]
    for i in range(len(rows)):
        torch.mul(before, decays[i], out=after)
        before = after
        q, k = (_of_v_heads(a, heads) for heads in rows.qk[i])
        new = (rows.v[i] if a.mamba else rows.v[i] - (known * k).sum(-1)) * rows.rate[i][:, None]
        known.addcmul_(new[:, :, None], k)
        torch.sum(known * q, -1, out=out[i])


def _of_v_heads(a: DeltaNet, heads: Tensor) -> Tensor:
    """A row of q or k for each head of v [heads, 1, columns]."""
    each = by_k_heads(a, torch.empty(a.v_heads, 1, a.k_dim))
    each.copy_(of_k_heads(a, heads[:, None]))
    return each.view(a.v_heads, 1, a.k_dim)
