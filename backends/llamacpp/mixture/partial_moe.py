"""Mixtures that leave the part of some experts to others: what these would compute is not computed here
(kernels/experts.c). Without that library it is, and does not count."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import Floats, Pass, slots_of
from hetrun.backends.llamacpp import ggml_api
from hetrun.backends.llamacpp.ggml_api import NE
from hetrun.backends.llamacpp.graph_builder import FLOAT, TensorRef, Writer
from hetrun.backends.llamacpp.kernels.expert_sort import Pairs, Sorter, Sum
from hetrun.backends.llamacpp.mixture import expert_ops, router
from hetrun.backends.llamacpp.mixture.router import RouterChoice
from hetrun.graph import Op
from hetrun.graph.ops import Moe

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.lowering import GgmlEmitter

ALL_THREADS, ONE_THREAD = -1, 1


@dataclass(slots=True)
class SortNodes:
    """The two nodes around the products of one op; ggml has only the addresses of their structures."""

    pairs: Pairs
    sum: Sum
    left_out: NDArray[np.uint8]
    most: int  # pairs
    tensors: tuple[int, int, int, int, int]  # chosen, shares, the sorted pairs, results, their sum
    sizes: NDArray[np.int64]  # where in the graph's memory sizes stand that are as long as there are pairs
    addresses: NDArray[np.int64]

    def point(self) -> None:
        """Write the addresses into the structures; ggml has given the graph its memory."""
        chosen, shares, table, results, out = (ggml_api.tensor_at(t).data for t in self.tensors)
        p, row = self.pairs, FLOAT * self.most
        p.chosen, p.shares, p.expert, p.row, p.share = chosen, shares, table, table + row, table + 2 * row
        self.sum.results, self.sum.out = results, out

    def patch(self, memory: NDArray[np.int64]) -> None:
        """Before a run: ggml plans its work for as many pairs as there can be."""
        memory[self.sizes] = self.most


@dataclass(frozen=True, slots=True)
class LeftOutExperts:
    """What a mixture leaves to others: of each expert whether it is left out, and the same as what shares are
    multiplied by. Nodes read it in each run."""

    op: Op
    left_out: NDArray[np.uint8]
    stays: Floats

    def patch(self, work: Pass) -> None:
        """Before a run, where the pass says what lies in others' slots."""
        np.greater_equal(slots_of(self.op, work), 0, out=self.left_out.view(np.bool_))
        np.equal(self.left_out, 0, out=self.stays, casting="unsafe")


def leaves(e: GgmlEmitter, op: Op) -> LeftOutExperts | None:
    """What a mixture leaves to others; None where that is nothing."""
    a = op.attrs
    assert isinstance(a, Moe)
    if not a.without and not a.slots:
        return None
    found = LeftOutExperts(op, np.zeros(a.n_experts, np.uint8), np.ones(a.n_experts, np.float32))
    found.left_out[list(a.without)], found.stays[list(a.without)] = 1, 0
    e.inputs.kept += [found.left_out, found.stays]
    if a.slots:
        e.inputs.leaves.append(found)
    return found


def kept_shares(e: GgmlEmitter, a: Moe, stays: Floats, choice: RouterChoice, shares: int, rows: int) -> int:
    """The shares of the chosen experts, those of experts that are left out being 0."""
    lib, ctx = e.lib, e.ctx
    row = e.w.external(ggml_api.F32, a.n_experts, 1, stays.ctypes.data)
    mine = router.of_chosen(e, a, router.for_all(e, choice, row), choice.chosen, rows)
    found: int = lib.ggml_mul(ctx, shares, mine)
    return found


def mixture(
    e: GgmlEmitter, lib: Sorter, op: Op, x: TensorRef, chosen: int, shares: int, left_out: NDArray[np.uint8]
) -> int:
    """What the experts that are not left out give, as [width, rows]."""
    a, ggml, ctx, weights = op.attrs, e.lib, e.ctx, e.weights(op)
    assert isinstance(a, Moe)
    more = a.others(weights)
    used, most = a.n_used, a.n_used * x.rows
    stride = ggml_api.tensor_at(chosen).nb[1] // 4
    pairs = Pairs(rows=x.rows, used=used, stride=stride, left_out=left_out.ctypes.data)
    sources = chosen, shares
    table = _custom(e, ggml_api.I32, (most, 3), sources, lib.sort, ONE_THREAD, addressof(pairs))
    row = FLOAT * most
    ids = ggml.ggml_view_2d(ctx, table, 1, most, FLOAT, 0)
    rows = ggml.ggml_view_1d(ctx, table, most, row)
    some = ggml.ggml_get_rows(ctx, e.w.plain(x), rows)
    each = ggml.ggml_reshape_3d(ctx, some, x.width, 1, most)
    lengths = {ids: 1, rows: 0, some: 1, each: 2}

    def product(matrix: int, of: int) -> int:
        found = ggml.ggml_mul_mat_id(ctx, weights[1 + matrix], of, ids)
        made = expert_ops.biased(e, found, more.get(expert_ops.BIASES[matrix], 0), ids)
        lengths.update({found: 2, made: 2})
        return made

    gated, upped = product(0, each), product(1, each)
    inner = expert_ops.activated(e, a.activation, gated, upped)
    lengths[inner] = 2
    results = product(2, inner)
    total = Sum(pairs=addressof(pairs), width=x.width)
    out = _custom(
        e, ggml_api.F32, (x.width, x.rows), (results, table), lib.sum, ALL_THREADS, addressof(total)
    )
    words = np.array([e.w.word(tensor, NE[at]) for tensor, at in lengths.items()])
    addresses = e.w.memory.ctypes.data + 8 * words
    pairs.sizes, pairs.n_sizes = addresses.ctypes.data, len(addresses)
    tensors = (chosen, shares, table, results, out)
    e.inputs.sorted.append(SortNodes(pairs, total, left_out, most, tensors, words, addresses))
    return out


def _custom(
    e: GgmlEmitter,
    kind: int,
    shape: tuple[int, int],
    sources: Sequence[int],
    function: int,
    n: int,
    data: int,
) -> int:
    given = (c_void_p * len(sources))(*sources)
    node: int = e.lib.ggml_custom_4d(e.ctx, kind, *shape, 1, 1, given, len(sources), function, n, data)
    ggml_api.tensor_at(node).name = ggml_api.SORTED.encode()
    return node


class GraphLeftovers:
    """What the mixtures of one graph leave to others."""

    def __init__(self, w: Writer, nodes: Sequence[SortNodes], leaves: Sequence[LeftOutExperts]) -> None:
        self._memory, self._nodes, self._leaves = w.memory, nodes, leaves
        for node in nodes:
            node.point()

    def patch(self, work: Pass) -> None:
        """Before a run."""
        for each in self._leaves:
            each.patch(work)
        for node in self._nodes:
            node.patch(self._memory)
