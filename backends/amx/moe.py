"""A mixture of experts: rows are gathered by expert, and each expert multiplies its own at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hetrun.backends.amx.bf16_matmul import BF16, Activation, FusedActivation, activate
from hetrun.backends.amx.buffers import AmxExpertProducts
from hetrun.graph.ops import CLAMP, CLAMP_STEEPNESS, Moe, MoreWeight

ACTIVATIONS: Mapping[str, Activation] = {"silu": "swish", "gelu": "gelu-tanh"}
LEAST = 1e-20  # of what shares are divided by


@dataclass(frozen=True, slots=True)
class AmxMixture:
    """A mixture, and its weights where this backend has them."""

    attrs: Moe
    router: Tensor
    gates: AmxExpertProducts
    ups: AmxExpertProducts
    downs: AmxExpertProducts
    more: Mapping[MoreWeight, Tensor]


def moe(m: AmxMixture, x: Tensor, looked_at: Tensor, check: Callable[[], None]) -> Tensor:
    """`looked_at`: by the router. `check` is called before each expert; it raises after a cancellation."""
    a = m.attrs
    chosen, shares = route(a, torch.mm(looked_at, m.router.t()), m.more)
    out, rounded = torch.zeros_like(x), x.to(BF16)
    for expert in range(a.matrices):
        rows, place = torch.nonzero(chosen == a.first + expert, as_tuple=True)
        if not len(rows) or expert in a.without:
            continue
        check()
        mine = m.downs.products[expert](gated(m, expert, rounded[rows])).float()
        if "down_bias" in m.more:
            mine = mine + m.more["down_bias"][expert]
        out.index_add_(0, rows, mine.mul_(shares[rows, place, None]))
    return out


def route(a: Moe, scores: Tensor, more: Mapping[MoreWeight, Tensor]) -> tuple[Tensor, Tensor]:
    """For each row its experts, best first, and the share that each has in the result."""
    if "router_bias" in more:
        scores = scores + more["router_bias"].view(-1)
    parts = torch.sigmoid(scores) if a.scores == "sigmoid" else torch.softmax(scores, dim=-1)
    liked = parts + more["choice_bias"].view(-1) if "choice_bias" in more else scores
    liked = of_best_groups(a, liked)
    order = torch.sort(liked, dim=-1, descending=True, stable=True).indices[:, : a.n_used]
    shares = parts.gather(-1, order)
    if a.normalise:
        shares = shares / shares.sum(dim=-1, keepdim=True).clamp_min_(LEAST)
    if "expert_scale" in more:
        shares = shares * more["expert_scale"].view(-1)[order]
    return order, shares * a.scale


def of_best_groups(a: Moe, liked: Tensor) -> Tensor:
    """How much each expert is liked, and nothing of those in other groups."""
    if a.groups_used == a.groups:
        return liked
    by_group = liked.view(len(liked), a.groups, -1)
    worth = by_group.topk(a.group_best, dim=-1).values.sum(dim=-1)
    best = worth.topk(a.groups_used, dim=-1).indices
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
    return by_group.masked_fill(~kept[:, :, None], -torch.inf).view(liked.shape)


def gated(m: AmxMixture, expert: int, x: Tensor) -> Tensor:
    """What goes through an expert's last matrix, in bf16."""
    gate, up, activation = m.gates.products[expert], m.ups.products[expert], m.attrs.activation
    names: tuple[MoreWeight, ...] = ("gate_bias", "up_bias")
    biases = [m.more[name][expert] if name in m.more else None for name in names]
    if activation == "clamped":
        g, u = (product(x, bias).float() for product, bias in zip((gate, up), biases, strict=True))
        g, u = g.clamp_(max=CLAMP), u.clamp_(-CLAMP, CLAMP)
        return torch.sigmoid(CLAMP_STEEPNESS * g).mul_(g).mul_(u.add_(1)).to(BF16)
    act = ACTIVATIONS[activation]
    if isinstance(gate, FusedActivation) and isinstance(up, FusedActivation):
        return gate.gated(up, x, act, (biases[0], biases[1]))
    return activate(gate(x, biases[0]), act).mul_(up(x, biases[1]))
