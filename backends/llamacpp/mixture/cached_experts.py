"""Mixtures whose experts are not all in memory: each comes when a router has chosen it, and stays in a slot
as long as others are worth less (hetrun/prefetch/expert_slots.c). A whole mixture is one node of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import WeightUse
from hetrun.backend.weight_streaming import MOST_HINTED, ExpertSupply, Mixture
from hetrun.backends.llamacpp import fusion, ggml_api
from hetrun.backends.llamacpp.graph_builder import FLOAT
from hetrun.backends.llamacpp.kernels import matmul
from hetrun.backends.llamacpp.kernels.matmul import MatmulLibrary
from hetrun.backends.llamacpp.mixture import router
from hetrun.backends.llamacpp.mixture.expert_matmul import (
    ALL_THREADS,
    INDEX,
    ONE_THREAD,
    ExpertNode,
    RoutedPairs,
    activation_of,
    set_biases,
)
from hetrun.graph import Op, Weight
from hetrun.graph.ops import MIXTURE, Moe

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.lowering import GgmlEmitter

CACHED = "cached"  # the layout of these weights
ALIGNMENT = 64


class CachedExperts:
    """All of them; see hetrun.backend.weight_streaming.Cacheable."""

    def __init__(self, products: MatmulLibrary, packs: Callable[[WeightUse], MatmulLibrary | None]) -> None:
        self._products, self._packs = products, packs
        self._numbers: dict[tuple[Weight, ...], int] = {}  # of each mixture, by its gate, up and down
        self._weights: frozenset[Weight] = frozenset()
        self._mixtures: Sequence[Mixture] = ()
        self.supply: ExpertSupply | None = None

    def mixtures(self, ops: Sequence[Op]) -> tuple[Mixture, ...]:
        """All of some ops, in their order; none where products of our own do not take some of them."""
        found = [self._mixture(op) for op in ops if isinstance(op.attrs, Moe)]
        return tuple(m for m in found if m) if all(found) else ()

    def _mixture(self, op: Op) -> Mixture | None:
        a, experts = op.attrs, fusion.uses(op)[1:MIXTURE]
        assert isinstance(a, Moe)
        gate, up, down = (use.weight for use in experts)
        if (
            a.without
            or a.slots
            or a.held
            or gate.quant != up.quant
            or not all(self._packs(use) for use in experts)
        ):
            return None
        starts, end = [], 0
        for weight in (gate, up, down):
            starts.append(end)
            end += -(-self._packed_bytes(weight, a.n_experts) // ALIGNMENT) * ALIGNMENT
        return Mixture(op.scope, (gate, up, down), a.n_experts, a.n_used, tuple(starts), end)

    def _packed_bytes(self, weight: Weight, experts: int) -> int:
        rows, cols = weight.shape
        return self._products.packed_bytes(weight.quant.ggml_id, (rows // experts, cols))

    def prepare(self, mixtures: Sequence[Mixture], supply: ExpertSupply) -> None:
        """From now on these come from there."""
        self.supply, self._mixtures = supply, mixtures
        self._numbers = {mixture.weights: i for i, mixture in enumerate(mixtures)}
        self._weights = frozenset(weight for mixture in mixtures for weight in mixture.weights)

    def has(self, use: WeightUse) -> bool:
        """Whether a weight is one of these."""
        return use.use == "experts" and use.weight in self._weights

    def number(self, weights: tuple[Weight, ...]) -> int:
        """Of a mixture, by its gate, up and down."""
        return self._numbers[weights]

    def starts(self, number: int) -> tuple[int, ...]:
        """Where the packed matrices of a mixture begin in a slot."""
        return self._mixtures[number].starts


@dataclass(slots=True)
class CachedNode:
    """One mixture in a graph; ggml has only the address of its structure."""

    made: matmul.CachedMixture
    wanted: NDArray[np.int32]  # which experts, and by how many rows each


@dataclass(slots=True)
class HintNode:
    """What the next mixture may choose."""

    made: matmul.ExpertHint
    chosen: int  # a tensor

    def point(self) -> None:
        """Write down where the numbers will stand; ggml has given the graph its memory."""
        self.made.chosen = ggml_api.tensor_at(self.chosen).data


def multiply(e: GgmlEmitter, cached: CachedExperts, op: Op, routed: RoutedPairs, x: int) -> int:
    """One node: what each pair's expert makes of its row, [width, used, rows]."""
    a, uses, lib = op.attrs, fusion.uses(op)[1:MIXTURE], e.products
    assert isinstance(a, Moe)
    assert lib is not None
    assert cached.supply is not None
    number = cached.number(tuple(use.weight for use in uses))
    wanted = np.zeros((2, a.n_experts), np.int32)
    made = matmul.CachedMixture(
        supply=cached.supply.address,
        mixture=number,
        starts=(c_int64 * matmul.MATRICES)(*cached.starts(number)),
        experts=wanted[0].ctypes.data,
        rows=wanted[1].ctypes.data,
    )
    used, rows = routed.made.used, routed.made.rows
    table = (c_void_p * 1)(routed.table)
    want = lib.want_address, ONE_THREAD, addressof(made)
    inner: int = e.lib.ggml_custom_4d(e.ctx, ggml_api.F32, a.n_ff, used, rows, 1, table, 1, *want)
    e.w.expand(inner)
    _hint(e, cached, op)
    tensors = (c_void_p * 3)(inner, x, routed.table)
    function = lib.mixture_address, ALL_THREADS, addressof(made)
    out: int = e.lib.ggml_custom_4d(
        e.ctx, ggml_api.F32, uses[2].weight.shape[0] // a.n_experts, used, rows, 1, tensors, 3, *function
    )
    ggml_api.tensor_at(inner).name = ggml_api.SORTED.encode()
    ggml_api.tensor_at(out).name = ggml_api.PRODUCT.encode()
    more = a.others(e.weights(op))
    biases = [more.get(name, 0) for name in ("gate_bias", "up_bias", "down_bias")]
    _describe(e, made.inner, uses[0], 2, routed, x)
    _describe(e, made.last, uses[2], 1, routed, inner)
    made.inner.each.activation = activation_of(a.activation, True)
    set_biases(made.inner.each, biases[:2])
    set_biases(made.last.each, biases[2:])
    made.last.by_pair = 1
    e.inputs.products += [ExpertNode(made.inner, routed, x, inner), ExpertNode(made.last, routed, inner, out)]
    e.inputs.cached.append(CachedNode(made, wanted))
    return out


def _hint(e: GgmlEmitter, cached: CachedExperts, op: Op) -> None:
    """A node that has the experts read which the next mixture would choose of this one's rows: the stream
    changes little from layer to layer."""
    x, after = e.values[op.inputs[-1]], e.next_mixture(op)
    if after is None or x.rows > MOST_HINTED or x.rows != e.count(after.out.rows):
        return
    lib, a = e.lib, after.attrs
    assert isinstance(a, Moe)
    assert e.products is not None
    assert cached.supply is not None
    rows = e.w.plain(x)
    if (ratio := _ratio(e, op, after)) is not None:
        e.inputs.kept.append(ratio)
        rows = lib.ggml_mul(e.ctx, rows, e.w.external(ggml_api.F32, x.width, 1, ratio.ctypes.data))
    chosen = router.choose(e, after, rows, x.rows).chosen
    made = matmul.ExpertHint(
        supply=cached.supply.address,
        mixture=cached.number(tuple(use.weight for use in fusion.uses(after)[1:MIXTURE])),
        rows=x.rows,
        used=a.n_used,
        stride=ggml_api.tensor_at(chosen).nb[1] // INDEX,
    )
    sources, function = (c_void_p * 1)(chosen), (e.products.hint_address, ONE_THREAD, addressof(made))
    node = lib.ggml_custom_4d(e.ctx, ggml_api.I32, 1, 1, 1, 1, sources, 1, *function)
    ggml_api.tensor_at(node).name = ggml_api.SORTED.encode()
    e.inputs.hints.append(HintNode(made, chosen))
    e.w.expand(node)


def _ratio(e: GgmlEmitter, op: Op, after: Op) -> NDArray[np.float32] | None:
    """What makes of a row's norm before one mixture that before another."""
    gains = [e.gain(each.inputs[-1]) for each in (op, after)]
    if gains[0] is None or gains[1] is None:
        return None
    return np.divide(gains[1], gains[0], out=np.ones_like(gains[1]), where=gains[0] != 0)


def _describe(
    e: GgmlEmitter, whole: matmul.ExpertProducts, use: WeightUse, halves: int, routed: RoutedPairs, x: int
) -> None:
    """One of both products, but for its weights, which are those of each expert."""
    assert e.products is not None
    width, cols = use.weight.shape[0] // use.matrices, use.weight.shape[1]
    whole.routing = addressof(routed.made)
    each = whole.each
    each.type, each.rows, each.cols = use.weight.quant.ggml_id, width * halves, cols
    each.n, each.out_stride = routed.made.rows, width
    each.x_stride = ggml_api.tensor_at(x).nb[1] // FLOAT
    each.level, each.exact = e.products.level, e.exact
