"""Products by the experts of a mixture, in our own layout, as nodes of a graph.

A row and one of its experts are a pair. The first node finds which pairs each expert has (`struct routing`);
products by all experts follow, gate and up as one. Results lie as ggml has them, [width, experts of a row,
rows], so either of them may be ggml's as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import addressof, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import WeightUse
from hetrun.backends.llamacpp import ggml_api
from hetrun.backends.llamacpp.graph_builder import FLOAT
from hetrun.backends.llamacpp.kernels import matmul
from hetrun.graph.ops import Activation

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.lowering import GgmlEmitter
    from hetrun.backends.llamacpp.packed_matmul import MatmulNode

ALL_THREADS, ONE_THREAD = -1, 1
INDEX = 4  # bytes
ACTIVATIONS: Mapping[Activation, int] = {
    "silu": matmul.SWIGLU, "gelu": matmul.GEGLU, "clamped": matmul.CLAMPED
}  # fmt: skip


@dataclass(slots=True)
class RoutedPairs:
    """Which pairs each expert has; ggml has only the address of its structure."""

    made: matmul.RoutingStruct
    left_out: NDArray[np.uint8] | None
    chosen: int  # tensors
    table: int

    def point(self) -> None:
        """Write the addresses into its structure; ggml has given the graph its memory."""
        made, pairs = self.made, self.made.rows * self.made.used
        made.chosen, made.first = (ggml_api.tensor_at(t).data for t in (self.chosen, self.table))
        made.row = made.first + INDEX * (made.experts + 1)
        made.pair = made.row + INDEX * pairs


@dataclass(slots=True)
class ExpertNode:
    """One product by all experts in a graph."""

    whole: matmul.ExpertProducts
    routed: RoutedPairs
    x: int  # tensors
    out: int
    partial = False

    @property
    def made(self) -> matmul.ProductStruct:
        """The product by one of them, but for which."""
        each: matmul.ProductStruct = self.whole.each
        return each

    @property
    def counters(self) -> int:
        """How many it counts with."""
        experts: int = self.routed.made.experts
        return matmul.COUNTERS * experts

    def follow(self, after: MatmulNode | ExpertNode) -> None:
        """What it asks memory for at its end: experts that follow by the same routing, or a product."""
        if not isinstance(after, ExpertNode):
            self.made.next = addressof(after.made)
        elif after.routed is self.routed:
            self.whole.after = addressof(after.whole)

    def point(self) -> None:
        """Write the addresses of its rows into its structure."""
        self.routed.point()
        self.made.x, self.made.out = (ggml_api.tensor_at(t).data for t in (self.x, self.out))

    def work_bytes(self, lib: matmul.MatmulLibrary) -> int:
        """What each thread works in: all rows may have chosen the same expert."""
        return lib.scratch(self.made.type, self.made.kept_rows, self.made.cols)


def route(
    e: GgmlEmitter, chosen: int, rows: int, used: int, experts: int, left_out: NDArray[np.uint8] | None
) -> RoutedPairs:
    """One node: which pairs each expert has, those of some left out."""
    lib, pairs = e.products, rows * used
    assert lib is not None
    made = matmul.RoutingStruct(rows=rows, used=used, experts=experts)
    made.stride = ggml_api.tensor_at(chosen).nb[1] // INDEX
    if left_out is not None:
        made.left_out = left_out.ctypes.data
    function = (lib.route_address, ONE_THREAD, addressof(made))
    table = e.lib.ggml_custom_4d(
        e.ctx, ggml_api.I32, experts + 1 + 2 * pairs, 1, 1, 1, (c_void_p * 1)(chosen), 1, *function
    )
    ggml_api.tensor_at(table).name = ggml_api.SORTED.encode()
    return RoutedPairs(made, left_out, chosen, table)


def activation_of(activation: Activation, gated: bool) -> int:
    """What becomes of results, as the library numbers it."""
    return ACTIVATIONS[activation] if gated else matmul.PLAIN


def set_biases(each: matmul.ProductStruct, biases: Sequence[int]) -> None:
    """Of one matrix or of two: tensors with a row for each expert, or 0."""
    found = [ggml_api.tensor_at(bias).data for bias in biases if bias]
    if found:
        each.bias = found[0]
        each.second_bias = found[1] if len(found) > 1 else None


def multiply(
    e: GgmlEmitter,
    routed: RoutedPairs,
    weights: Sequence[tuple[WeightUse, int]],
    biases: Sequence[int],
    activation: Activation,
    x: int,
    by_pair: bool,
) -> int:
    """One node: what each pair's expert makes of its row, or of a row of the pair's own. Of two weights the
    first is a gate, which opens what the second one makes. Returns [width, used, rows]."""
    lib, (use, first) = e.products, weights[0]
    assert lib is not None
    gated = len(weights) > 1
    width, cols = use.weight.shape[0] // use.matrices, use.weight.shape[1]
    whole = matmul.ExpertProducts(routing=addressof(routed.made), by_pair=by_pair)
    whole.bytes = lib.packed_bytes(use.weight.quant.ggml_id, (width, cols))
    each = whole.each
    each.weights = ggml_api.tensor_at(first).data
    each.type, each.rows, each.cols = use.weight.quant.ggml_id, width * len(weights), cols
    each.n, each.out_stride = routed.made.rows, width
    each.x_stride = ggml_api.tensor_at(x).nb[1] // FLOAT
    each.activation, each.level = activation_of(activation, gated), lib.level
    each.exact = e.exact
    set_biases(each, biases)
    if gated:
        each.second = ggml_api.tensor_at(weights[1][1]).data
    tensors = [*(tensor for _, tensor in weights), x, routed.table]
    function = (lib.experts_address, ALL_THREADS, addressof(whole))
    out: int = e.lib.ggml_custom_4d(
        e.ctx, ggml_api.F32, width, routed.made.used, routed.made.rows, 1,
        (c_void_p * len(tensors))(*tensors), len(tensors), *function,
    )  # fmt: skip
    ggml_api.tensor_at(out).name = ggml_api.PRODUCT.encode()
    e.inputs.products.append(ExpertNode(whole, routed, x, out))
    return out
