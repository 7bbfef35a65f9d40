"""Products by weights in our own layout, with what is fused into them, as nodes of a graph.

What a node computes stands in a structure (`struct product`) that is written once: the addresses of its rows
are known when ggml has given the graph its memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hetrun.backends.llamacpp import ggml_api
from hetrun.backends.llamacpp.fusion import StackedProduct
from hetrun.backends.llamacpp.graph_builder import FLOAT, TensorRef
from hetrun.backends.llamacpp.kernels import matmul
from hetrun.graph import Op
from hetrun.graph.ops import Gelu, RmsNorm

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.lowering import GgmlEmitter
    from hetrun.backends.llamacpp.mixture.expert_matmul import ExpertNode

ALL_THREADS = -1
CACHE_LINE = 64


@dataclass(slots=True)
class MatmulNode:
    """One product in a graph."""

    made: matmul.ProductStruct
    x: int  # tensors
    out: int
    residual: int | None
    halves: int
    counters = matmul.COUNTERS

    def point(self) -> None:
        """Write the addresses of its rows into its structure."""
        made = self.made
        made.x, made.out = (ggml_api.tensor_at(t).data for t in (self.x, self.out))
        if self.residual is not None:
            made.residual = ggml_api.tensor_at(self.residual).data

    @property
    def partial(self) -> bool:
        """Whether it may have to wait for its weight."""
        return bool(self.made.partial)

    def work_bytes(self, lib: matmul.MatmulLibrary) -> int:
        """What each thread works in."""
        made = self.made
        unit = lib.unit(made.type, made.cols, self.halves) if self.partial else 0
        return lib.scratch(made.type, made.kept_rows, made.cols) + unit

    def follow(self, after: MatmulNode | ExpertNode) -> None:
        """What it asks memory for at its end. Which experts come after it is not known then."""
        if isinstance(after, MatmulNode):
            self.made.next = ctypes.addressof(after.made)


@dataclass(slots=True)
class LookupNode:
    """One lookup in a graph."""

    lookup: matmul.RowLookup
    ids: int  # tensors
    out: int

    def point(self) -> None:
        """Write the addresses of its numbers and rows into its structure."""
        self.lookup.ids, self.lookup.out = (ggml_api.tensor_at(t).data for t in (self.ids, self.out))


def multiply(e: GgmlEmitter, item: StackedProduct, weight: int, vectors: Sequence[int]) -> TensorRef:
    """One node; `vectors` are the bias and the norm's gain, as far as there are any. Returns its result."""
    lib = e.products
    assert lib is not None
    x = e.values[item.input]
    rows, cols = item.weight.shape
    width = rows // 2 if item.gate else rows
    made = matmul.ProductStruct(
        weights=ggml_api.tensor_at(weight).data,
        type=item.weight.quant.ggml_id,
        rows=rows,
        cols=cols,
        n=x.rows,
        x_stride=x.stride // FLOAT,
        out_stride=width,
        activation=_activation(item.gate),
        level=lib.level,
        partial=e.partial_address(item.weight),
        exact=e.exact,
    )
    left = list(vectors)
    if item.bias:
        made.bias = ggml_api.tensor_at(left.pop(0)).data
    if item.norm:
        assert isinstance(item.norm.attrs, RmsNorm)
        made.gain, made.eps = ggml_api.tensor_at(left.pop(0)).data, item.norm.attrs.eps
    tensors = [weight, e.w.plain(x)]
    if item.added:
        residual = e.values[item.added]
        made.residual_stride = residual.stride // FLOAT
        tensors.append(e.w.plain(residual))
    sources = (c_void_p * len(tensors))(*tensors)
    function = (lib.product_address, ALL_THREADS, ctypes.addressof(made))
    out = e.lib.ggml_custom_4d(e.ctx, ggml_api.F32, width, x.rows, 1, 1, sources, len(tensors), *function)
    ggml_api.tensor_at(out).name = ggml_api.PRODUCT.encode()
    node = MatmulNode(made, tensors[1], out, tensors[2] if item.added else None, 2 if item.gate else 1)
    e.inputs.products.append(node)
    return e.w.result(out, width, x.rows)


def look_up(e: GgmlEmitter, op: Op, weight: int, ids: int) -> int:
    """One node: the rows with these numbers as floats."""
    lib = e.products
    assert lib is not None
    table = op.weights[0]
    (rows, cols), n = table.shape, e.count(op.out.rows)
    made = matmul.RowLookup(
        weights=ggml_api.tensor_at(weight).data if weight else None,
        type=table.quant.ggml_id,
        rows=rows,
        cols=cols,
        n=n,
        out_stride=cols,
        level=lib.level,
        partial=e.partial_address(table),
    )
    if source := e.row_source(table):
        made.supply, made.file, made.offset = source
    tensors = [weight, ids] if weight else [ids]
    sources = (c_void_p * len(tensors))(*tensors)
    function = (lib.lookup_address, ALL_THREADS, ctypes.addressof(made))
    out: int = e.lib.ggml_custom_4d(e.ctx, ggml_api.F32, cols, n, 1, 1, sources, len(tensors), *function)
    e.inputs.lookups.append(LookupNode(made, ids, out))
    return out


def _activation(gate: Op | None) -> int:
    if gate is None:
        return matmul.PLAIN
    if gate.kind == "swiglu":
        return matmul.SWIGLU
    return matmul.GEGLU_ERF if isinstance(gate.attrs, Gelu) and gate.attrs.exact else matmul.GEGLU


class PackedProducts:
    """The products of one graph, once ggml has given it memory."""

    def __init__(
        self,
        lib: matmul.MatmulLibrary | None,
        nodes: Sequence[MatmulNode | ExpertNode],
        lookups: Sequence[LookupNode],
        slots: int,
    ) -> None:
        self._nodes, self._lookups = nodes, lookups  # ggml has only the addresses of their structures
        # Nodes run one after the other, and leave them as they were.
        self._counters = np.zeros(max((node.counters for node in nodes), default=0), np.int32)
        self._scratch = np.empty(0, np.uint8)
        self._shared = np.empty(0, np.uint8)
        for lookup in lookups:
            lookup.point()
        # Whether some of them may have to wait for their weights.
        self.partial = any(n.partial for n in nodes) or any(one.lookup.supply for one in lookups)
        if lib and nodes:
            self._share(lib, slots)
            for node, after in pairwise(nodes):
                node.follow(after)

    @property
    def nbytes(self) -> int:
        """Memory that they work in."""
        return self._scratch.nbytes + self._shared.nbytes

    def _share(self, lib: matmul.MatmulLibrary, slots: int) -> None:
        """All work in the same memory, and count with the same counters."""
        each = max(node.work_bytes(lib) for node in self._nodes)
        each = -(-each // CACHE_LINE) * CACHE_LINE
        self._scratch = np.empty(each * slots + CACHE_LINE, np.uint8)
        partial = [node.made for node in self._nodes if node.partial]
        shared = max((lib.shared(made.type, made.kept_rows, made.cols) for made in partial), default=0)
        self._shared = np.empty(shared + CACHE_LINE, np.uint8)
        for node in self._nodes:
            node.point()
            made = node.made
            made.scratch, made.scratch_size, made.slots = _line(self._scratch), each, slots
            made.counters, made.shared = self._counters.ctypes.data, _line(self._shared)


def _line(memory: NDArray[np.uint8]) -> int:
    """The first address in it where a cache line begins."""
    address: int = memory.ctypes.data
    return -(-address // CACHE_LINE) * CACHE_LINE
