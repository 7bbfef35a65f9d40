"""A mixture of experts as ggml nodes: the router's choice, the products of those chosen, and their sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import WeightUse
from hetrun.backends.llamacpp import ggml_api, page_in
from hetrun.backends.llamacpp.fusion import uses
from hetrun.backends.llamacpp.graph_builder import TensorRef
from hetrun.backends.llamacpp.mixture import (
    cached_experts,
    expert_matmul,
    expert_ops,
    expert_stats,
    partial_moe,
    router,
)
from hetrun.backends.llamacpp.mixture.cached_experts import CACHED
from hetrun.backends.llamacpp.weight_memory import PACKED
from hetrun.graph import Op
from hetrun.graph.ops import MIXTURE, Moe, MoreWeight

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.lowering import GgmlEmitter


def moe(e: GgmlEmitter, op: Op) -> None:
    a = op.attrs
    assert isinstance(a, Moe)
    lib, ctx, x = e.lib, e.ctx, e.values[op.inputs[0]]
    choice = router.choose(e, op, e.w.plain(e.values[op.inputs[-1]]), x.rows)
    chosen = choice.chosen  # [n_used, rows]
    if x.rows <= expert_stats.MOST_ROWS and not a.held:
        expert_stats.keep(e, op, chosen)
    shares = router.shares(e, op, choice, x.rows)
    if a.matrices < a.n_experts:
        chosen, shares = router.held(e, a, choice, shares, x.rows)
    experts = uses(op)[1:MIXTURE]
    if e.cached and e.layout(experts[0]) == CACHED:
        routed = expert_matmul.route(e, chosen, x.rows, a.n_used, a.n_experts, None)
        results = cached_experts.multiply(e, e.cached, op, routed, e.w.plain(x))
        e.define(op, e.lib.ggml_reshape_2d(ctx, lib.ggml_out_prod(ctx, results, shares), x.width, x.rows))
        return
    mapped = e.mapped(experts[0])
    packed = [e.layout(use) == PACKED for use in experts]
    leaves = partial_moe.leaves(e, op)
    if leaves and e.sorter and not mapped and not all(packed):
        e.define(op, partial_moe.mixture(e, e.sorter, op, x, chosen, shares, leaves.left_out))
        return
    if leaves:
        shares = partial_moe.kept_shares(e, a, leaves.stays, choice, shares, x.rows)
    late = chosen
    if mapped:
        chosen, late = page_in.bring_experts(e, mapped, experts, chosen)
    mixture = GgmlMixture(e, op, x, chosen, late, leaves.left_out if leaves and all(packed) else None)
    alike = experts[0].weight.quant == experts[1].weight.quant
    if all(packed[:2]) and alike:
        inner = mixture.product((0, 1))
    else:
        inner = expert_ops.activated(e, a.activation, mixture.product((0,)), mixture.product((1,)))
    results = mixture.product((2,), inner)  # [width, n_used, rows]
    total = lib.ggml_out_prod(ctx, results, shares)  # [width, 1, rows]: their sum by shares, as one node
    e.define(op, lib.ggml_reshape_2d(ctx, total, x.width, x.rows))


class GgmlMixture:
    """The products of one mixture by gate, up and down: our own where weights are packed, else ggml's."""

    def __init__(
        self, e: GgmlEmitter, op: Op, x: TensorRef, chosen: int, late: int, left_out: NDArray[np.uint8] | None
    ) -> None:
        assert isinstance(op.attrs, Moe)
        self._e, self._x, self._attrs = e, x, op.attrs
        self._chosen, self._late = chosen, late  # of the first products, and of the last
        self._left_out = left_out
        weights = e.weights(op)
        self._uses: Sequence[WeightUse] = uses(op)[1:MIXTURE]
        self._weights = weights[1:MIXTURE]
        self._more: Mapping[MoreWeight, int] = op.attrs.others(weights)
        self._routed: expert_matmul.RoutedPairs | None = None

    def product(self, matrices: Sequence[int], inner: int = 0) -> int:
        """By one matrix, or by a gate and up; of the rows, or of what came of the first products."""
        e, first = self._e, matrices[0]
        biases = [self._more.get(expert_ops.BIASES[i], 0) for i in matrices]
        if e.layout(self._uses[first]) == PACKED:
            x = inner or e.w.plain(self._x)
            given = [(self._uses[i], self._weights[i]) for i in matrices]
            activation = self._attrs.activation
            return expert_matmul.multiply(e, self._route(), given, biases, activation, x, bool(inner))
        each = inner or e.w.heads(self._x, self._x.width)  # [width, 1, rows]
        chosen = self._late if inner else self._chosen
        found: int = e.lib.ggml_mul_mat_id(e.ctx, self._weights[first], each, chosen)
        return expert_ops.biased(e, found, biases[0], chosen)

    def _route(self) -> expert_matmul.RoutedPairs:
        if self._routed is None:
            used = ggml_api.tensor_at(self._chosen).ne[0]
            given = self._chosen, self._x.rows, used, self._uses[0].matrices, self._left_out
            self._routed = expert_matmul.route(self._e, *given)
        return self._routed
