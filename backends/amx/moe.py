"""A mixture of experts: rows are gathered by expert, and each expert multiplies its own at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hetrun.backends.amx.bf16_matmul import BF16, Inside, Product, activate
from hetrun.backends.amx.buffers import Experts
from hetrun.graph.ops import Moe


def moe(
    a: Moe, x: Tensor, router: Tensor, gates: Experts, ups: Experts, downs: Experts, check: Callable[[], None]
) -> Tensor:
    """`check` is called before each expert; it raises when somebody cancelled."""
    chosen, shares = route(a, torch.mm(x, router.t()))
    out, rounded = torch.zeros_like(x), x.to(BF16)
    for expert in range(a.matrices):
        rows, place = torch.nonzero(chosen == a.first + expert, as_tuple=True)
        if not len(rows) or expert in a.without:
            continue
        check()
        inner = gated(gates.products[expert], ups.products[expert], rounded[rows])
        mine = downs.products[expert](inner).float().mul_(shares[rows, place, None])
        out.index_add_(0, rows, mine)
    return out


def route(a: Moe, scores: Tensor) -> tuple[Tensor, Tensor]:
    """For each row its experts, best first, and the share that each has in the result."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, : a.n_used]
    shares = torch.softmax(scores, dim=-1).gather(-1, order)
    if a.normalise:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return order, shares * a.scale


def gated(gate: Product, up: Product, x: Tensor) -> Tensor:
    """silu(gate(x)) * up(x)."""
    if isinstance(gate, Inside) and isinstance(up, Inside):
        return gate.gated(up, x, "swish")
    return activate(gate(x), "swish").mul_(up(x))
