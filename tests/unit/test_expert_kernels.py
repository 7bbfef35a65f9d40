"""Products by the experts of a mixture in C: the same bits as expert by expert and row by row."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from hetrun.backends.llamacpp.kernels.matmul import (
    CLAMPED,
    COUNTERS,
    PLAIN,
    ROWS,
    ExpertProducts,
    RoutingStruct,
)
from hetrun.graph.quant import Floats
from tests.unit.test_matmul_kernels import (
    LEVELS,
    NODE,
    SCALES,
    STEPS,
    Fused,
    Weight,
    activations,
    aligned,
    computed,
    library,
    pool,
    same,
    weight,
)

pytestmark = pytest.mark.skipif(not LEVELS, reason="hetrun was installed without a C compiler")
Ints = NDArray[np.int32]
UNTOUCHED = 7.0


@dataclass(frozen=True)
class Routes:
    """What a router chose, in rows that are wider than what counts, and how the library sorted it."""

    made: RoutingStruct
    chosen: Ints
    left_out: NDArray[np.uint8]
    table: Ints

    @property
    def pairs(self) -> int:
        return len(self.chosen) * int(self.made.used)

    def of(self, expert: int) -> Ints:
        """The pairs of an expert, as they are expected."""
        used = int(self.made.used)
        rows, k = np.nonzero(self.chosen[:, :used] == expert)
        found: Ints = (rows * used + k).astype(np.int32)
        return found


def routed(n: int, used: int, experts: int, without: list[int], seed: int) -> Routes:
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(experts) for _ in range(n)]).astype(np.int32)
    left_out = np.zeros(experts, np.uint8)
    left_out[without] = 1
    table = np.full(experts + 1 + 2 * n * used, -1, np.int32)
    made = RoutingStruct(chosen=chosen.ctypes.data, rows=n, used=used, stride=experts, experts=experts)
    made.left_out = left_out.ctypes.data if without else None
    made.first = table.ctypes.data
    made.row = made.first + 4 * (experts + 1)
    made.pair = made.row + 4 * n * used
    for thread in range(2):  # one of them does it
        library().route(None, thread, 2, ctypes.addressof(made))
    return Routes(made, chosen, left_out, table)


def multiplied(
    routes: Routes,
    weights: list[Weight],
    biases: list[Floats],
    x: Floats,
    by_pair: bool,
    level: int,
    threads: int,
) -> Floats:
    """What the library makes of all pairs."""
    lib, experts = library(), int(routes.made.experts)
    width, cols = weights[0].rows // experts, weights[0].cols
    out = np.full((routes.pairs, width), UNTOUCHED, np.float32)
    whole = ExpertProducts(routing=ctypes.addressof(routes.made), by_pair=by_pair)
    whole.bytes = lib.packed_bytes(weights[0].quant.ggml_id, (width, cols))
    each = whole.each
    each.weights, each.type = weights[0].packed.ctypes.data, weights[0].quant.ggml_id
    each.rows, each.cols, each.level = width * len(weights), cols, level
    each.activation = CLAMPED if len(weights) > 1 else PLAIN
    if biases:
        each.bias = biases[0].ctypes.data
        each.second_bias = biases[1].ctypes.data if len(biases) > 1 else None
    each.second = weights[1].packed.ctypes.data if len(weights) > 1 else None
    each.x, each.x_stride, each.out, each.out_stride = x.ctypes.data, cols, out.ctypes.data, width
    each.n, each.slots, each.scratch_size = len(x), threads, lib.scratch(each.type, len(x), cols)
    scratch, counters = aligned(each.scratch_size * threads), np.zeros(COUNTERS * experts, np.int32)
    each.scratch, each.counters = scratch.ctypes.data, counters.ctypes.data
    each.next = ctypes.addressof(each)  # which changes nothing
    call = NODE(lib.experts_address)
    workers: ThreadPoolExecutor = pool()
    list(workers.map(lambda i: call(None, i, threads, ctypes.addressof(whole)), range(threads)))
    assert not counters.any()  # ready for the next call
    return out


def of_expert(w: Weight, expert: int, experts: int) -> Weight:
    rows = w.rows // experts
    size = w.packed.nbytes // experts
    part = slice(expert * rows, (expert + 1) * rows)
    return Weight(w.quant, rows, w.cols, w.stored[part], w.packed[expert * size : (expert + 1) * size])


def both(gate: Weight, up: Weight) -> Weight:
    """As halves of one weight."""
    stored, packed = (np.concatenate(pair) for pair in ((gate.stored, up.stored), (gate.packed, up.packed)))
    whole = aligned(packed.nbytes)
    whole[:] = packed
    return Weight(gate.quant, 2 * gate.rows, gate.cols, stored, whole)


@given(st.data())
@settings(max_examples=60)
def test_each_pair_gets_what_its_expert_makes_of_it(data: st.DataObject) -> None:
    draw = data.draw
    name, gated, by_pair = draw(st.sampled_from(sorted(SCALES))), draw(st.booleans()), draw(st.booleans())
    experts, n = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    used = draw(st.integers(1, experts))
    without = draw(st.lists(st.integers(0, experts - 1), unique=True, max_size=experts))
    level, threads = draw(st.sampled_from(LEVELS)), draw(st.integers(1, 4))
    routes = routed(n, used, experts, without, draw(st.integers(0, 99)))
    cols, rows = STEPS[name] * draw(st.integers(1, 2)), ROWS * draw(st.integers(1, 3))
    weights = [weight(name, rows * experts, cols, seed) for seed in range(1 + gated)]
    x = activations(routes.pairs if by_pair else n, cols)
    biases = [activations(experts, rows) for _ in weights] if draw(st.booleans()) else []
    out = multiplied(routes, weights, biases, x, by_pair, level, threads)
    for expert in range(experts):
        pairs = routes.of(expert)
        if expert in without:
            assert not out[pairs].any()
        elif len(pairs):
            mine = [of_expert(w, expert, experts) for w in weights]
            rows_of = pairs if by_pair else pairs // used
            whole, activation = (both(*mine), CLAMPED) if gated else (mine[0], PLAIN)
            bias = np.concatenate([b[expert] for b in biases]) if biases else None
            expected = computed(whole, x[rows_of], level, fused=Fused(bias=bias, activation=activation))
            assert same(out[pairs], expected)


def test_pairs_are_sorted_by_experts_and_rows() -> None:
    routes = routed(9, 2, 5, [3], 0)
    first, row, pair = routes.table[:6], routes.table[6 : 6 + 18], routes.table[6 + 18 :]
    for expert in (0, 1, 2, 4):
        assert pair[first[expert] : first[expert + 1]].tolist() == routes.of(expert).tolist()
    assert first[3] == first[4]
    assert sorted(pair[first[5] :].tolist()) == routes.of(3).tolist()
    assert (row == pair // 2).all()
