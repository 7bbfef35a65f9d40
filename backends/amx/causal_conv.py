"""A short convolution over time: a product for each of its taps, of the rows that far back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hetrun.backend import Pass
from hetrun.backends.amx.recurrent_states import LayerStates, pieces
from hetrun.backends.amx.weight_slices import spans
from hetrun.graph import Op
from hetrun.graph.ops import CausalConv
from hetrun.memory.kv.cache import KvCache

IN_CACHE = 1 << 19  # numbers that all taps are added to before the next ones


def taps_of(kernel: Tensor) -> Tensor:
    """The weight [width, taps] as a row for each tap, the oldest one first."""
    return kernel.t().contiguous()


def passing_bytes(a: CausalConv, tokens: int) -> int:
    """Memory that the op takes and gives back, besides its result: the rows and those before them."""
    return 4 * (tokens + a.kernel) * a.width


def causal_conv(op: Op, x: Tensor, taps: Tensor, bias: Tensor | None, work: Pass, kv: KvCache) -> Tensor:
    """Each row's result, in float32; the last rows of each sequence are written where the pass says."""
    a = op.attrs
    assert isinstance(a, CausalConv)
    slots, back = LayerStates.of(kv.state(a.layer, op.kind)), a.kernel - 1
    out = torch.empty(x.shape)
    for part in work.parts:
        tail = slots.before(part).view(back, a.width)
        rows = torch.cat((tail, x[part.a : part.b].float()))
        _convolve(a, rows, taps, bias, out[part.a : part.b])
        for _, end in pieces(part):
            kept = slots.after(part, end)
            if kept is not None:
                kept.view(back, a.width).copy_(rows[end : end + back])
    return out


def _convolve(a: CausalConv, rows: Tensor, taps: Tensor, bias: Tensor | None, out: Tensor) -> None:
    for lo, hi in spans(len(out), max(1, IN_CACHE // out.shape[1])):
        total = torch.mul(rows[lo:hi], taps[0], out=out[lo:hi])
        for far, tap in enumerate(taps[1:], 1):
            total.addcmul_(rows[lo + far : hi + far], tap)
        if bias is not None:
            total.add_(bias)
        if a.silu:
            functional.silu(total, inplace=True)
