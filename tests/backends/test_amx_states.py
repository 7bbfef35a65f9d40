"""Gated delta nets and short convolutions through torch, against numpy's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backend import Floats, Pass
from hetrun.backend.conformance.cases import FLOORS
from hetrun.backend.conformance.runner import nmse
from hetrun.errors import Cancelled
from hetrun.graph import Op, Value
from hetrun.graph.ops import CausalConv, DeltaNet
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.kv.states import NONE
from tests.support.examples import examples
from tests.unit.test_recurrent_kernels import (
    COMPANIES,
    CONVOLUTIONS,
    LAYERS,
    NETS,
    NOTHING,
    Given,
    Layer,
    Tokens,
    expected,
    kept,
    kind_of,
    numbers,
    parts,
    same_bits,
    sizes_of,
    states,
    total,
)

torch = pytest.importorskip("torch")
nets = pytest.importorskip("hetrun.backends.amx.delta_net")
convolutions = pytest.importorskip("hetrun.backends.amx.causal_conv")
triangular = pytest.importorskip("hetrun.backends.amx.triangular")

ROUNDED = FLOORS["bf16"]["delta_net"]  # of the mean square
EXACT = 1e-10
FEW: int = nets.FEW
LENGTHS = (1, FEW, FEW + 1, 16, 17, 63, 64, 65, 192)
SMALL = {name: a for name, a in NETS.items() if name != "widest"}


def never() -> None:
    """Not cancelled."""


def computed(a: Layer, data: Given, tokens: Sequence[Tokens], kv: KvCache) -> Floats:
    """What torch makes of it; states in the cache change."""
    work = Pass(NOTHING, NOTHING, (), NOTHING, parts(tokens))
    op = Op(kind_of(a), (), Value("out", 1, "tokens"), (), a, "test")
    x, w = (tuple(torch.from_numpy(array.copy()) for array in arrays) for arrays in (data.x, data.w))
    with torch.inference_mode():
        if isinstance(a, DeltaNet):
            gates = nets.Gates(a, *(vector[0] for vector in w))
            found = nets.delta_net(op, x, gates, work, kv, never)
        else:
            taps, bias = convolutions.taps_of(w[0]), next((b[:, 0] for b in w[1:]), None)
            found = convolutions.causal_conv(op, x[0], taps, bias, work, kv)
    result: Floats = found.numpy()
    return result


def check(a: Layer, data: Given, tokens: Sequence[Tokens], limit: float) -> None:
    """It is what the reference makes of it, as are the states; no other state changes."""
    kv, own = states(a), states(a)
    right, found = expected(a, data, tokens, kv), computed(a, data, tokens, own)
    assert nmse(right, found) <= limit
    written = sorted({slot for t in tokens for slot in t.write.values()})
    assert nmse(kept(a, kv)[written], kept(a, own)[written]) <= limit
    others = [slot for slot in range(len(kept(a, kv))) if slot not in written]
    assert np.array_equal(kept(a, kv)[others], kept(a, own)[others])


def limit_of(a: Layer, tokens: Sequence[Tokens]) -> float:
    """Few tokens are computed one by one, in float32."""
    cuts = [pairwise(sorted({0, *t.write, t.n})) for t in tokens]
    most = max(end - begin for cut in cuts for begin, end in cut)
    return ROUNDED if isinstance(a, DeltaNet) and most > FEW else EXACT


@pytest.mark.parametrize("company", COMPANIES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_as_the_reference_says(name: str, company: str) -> None:
    a, tokens = LAYERS[name], COMPANIES[company]
    check(a, numbers(a, total(tokens)), tokens, limit_of(a, tokens))


@pytest.mark.parametrize("read", [NONE, 5])
@pytest.mark.parametrize("n", LENGTHS)
def test_chunks_of_all_lengths(n: int, read: int) -> None:
    for name in ("neighbours", "usual tiled"):
        tokens = [Tokens(n, read, {n: 0})]
        check(NETS[name], numbers(NETS[name], n), tokens, limit_of(NETS[name], tokens))


@pytest.mark.parametrize("name", LAYERS)
def test_company_changes_no_bit(name: str) -> None:
    a = LAYERS[name]
    tokens = (*COMPANIES["several"], Tokens(65, 13, {64: 14, 65: 15}))
    data, together, apart = numbers(a, total(tokens)), states(a), states(a)
    found = computed(a, data, tokens, together)
    for part, of_one in zip(parts(tokens), tokens, strict=True):
        assert np.array_equal(computed(a, data.rows(part.a, part.b), [of_one], apart), found[part.a : part.b])
    assert same_bits(a, apart, together)


@pytest.mark.parametrize("name", ["odd tiled", "usual", "of three"])
@given(marks=st.sets(st.integers(1, 149), max_size=8), read=st.sampled_from((NONE, 5)))
@settings(max_examples=examples(10), deadline=None)
def test_marks_anywhere(name: str, marks: set[int], read: int) -> None:
    a, n = LAYERS[name], 150
    tokens = [Tokens(n, read, {p: 6 + i for i, p in enumerate(sorted({*marks, n}))})]
    check(a, numbers(a, n), tokens, ROUNDED if isinstance(a, DeltaNet) else EXACT)


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_one_by_one_are_in_float32(name: str) -> None:
    """Passes of one row, as --deterministic has them."""
    a, read = LAYERS[name], 5
    data, kv, own = numbers(a, 70), states(a), states(a)
    right = expected(a, data, [Tokens(70, read, {70: 0})], kv)
    found = []
    for i in range(70):
        found.append(computed(a, data.rows(i, i + 1), [Tokens(1, read, {1: 0})], own))
        read = 0
    assert nmse(right, np.concatenate(found)) < EXACT
    assert nmse(kept(a, kv), kept(a, own)) < EXACT


def test_a_state_that_nothing_is_to_keep_is_not_kept() -> None:
    for name in ("odd", "of three"):
        a = LAYERS[name]
        own = states(a)
        computed(a, numbers(a, 33), [Tokens(33, 5, {})], own)
        assert same_bits(a, own, states(a))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("decay", "rate"), [(100, 100), (100, -100), (-100, 100), (-100, -100), (20, 20)])
def test_extreme_decays_and_rates(name: str, decay: float, rate: float) -> None:
    a, tokens = NETS[name], COMPANIES["33"]
    data, some = numbers(a, 33), np.zeros((33, a.v_heads), np.float32)
    some[1::2] = 1  # the others are as usual, so that something comes out in any case
    inputs = data.x[0], data.x[1] + some * np.float32(decay), data.x[2] + some * np.float32(rate)
    check(a, Given(inputs, data.w), tokens, 2 * ROUNDED)


@pytest.mark.parametrize("name", SMALL)
def test_keys_that_are_alike(name: str) -> None:
    """The triangles' inverses are alternating sums then; that of their powers would have lost all digits."""
    a, n = NETS[name], 192
    data = numbers(a, n)
    x = data.x[0].copy()
    x[:, a.k_width : 2 * a.k_width] = (
        x[:1, a.k_width : 2 * a.k_width] + 0.01 * x[:, a.k_width : 2 * a.k_width]
    )
    long = np.full_like(data.x[1], -5)
    check(a, Given((x, long, 3 + data.x[2]), data.w), [Tokens(n, NONE, {n: 0})], 40 * ROUNDED)


def test_inputs_of_any_size_give_numbers() -> None:
    for a in LAYERS.values():
        for size in (0, *sizes_of(a)):
            data, kv = numbers(a, 33), states(a)
            data = replace(data, w=data.w[:1]) if isinstance(a, CausalConv) else data
            inputs = data.x[0] * np.float32(size), *data.x[1:]
            found = computed(a, Given(inputs, data.w), [Tokens(33, NONE, {33: 0})], kv)
            assert np.isfinite(found).all()
            assert np.isfinite(kept(a, kv)).all()
            assert size or not found.any()


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_inverses_of_triangles(rows: int) -> None:
    x = np.tril(np.random.default_rng(1).standard_normal((5, rows, rows)), -1) * rows**-0.5
    garbage = np.triu(np.full((rows, rows), np.nan))
    found = triangular.unit_inverse(torch.from_numpy((np.tril(x, -1) + garbage).astype(np.float32)))
    assert nmse(np.linalg.inv(np.eye(rows) + x), found.numpy()) < 1e-11


def test_a_cancel_leaves_what_was_read() -> None:
    a = NETS["usual"]
    data, kv = numbers(a, 200), states(a)
    asked = 0

    def cancelled() -> None:
        nonlocal asked
        asked += 1
        if asked > 2:
            raise Cancelled("stop")

    work = Pass(NOTHING, NOTHING, (), NOTHING, parts([Tokens(200, 5, {64: 1, 200: 0})]))
    op = Op("delta_net", (), Value("out", 1, "tokens"), (), a, "test")
    x, w = (tuple(torch.from_numpy(array) for array in arrays) for arrays in (data.x, data.w))
    with pytest.raises(Cancelled):
        nets.delta_net(op, x, nets.Gates(a, *(vector[0] for vector in w)), work, kv, cancelled)
    assert np.array_equal(kept(a, kv)[2:], kept(a, states(a))[2:])


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_cut_by_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, tokens = CONVOLUTIONS[name], COMPANIES["70"]
    data, whole, cut = numbers(a, 70), states(a), states(a)
    found = computed(a, data, tokens, whole)
    monkeypatch.setattr(convolutions, "IN_CACHE", 3 * a.width)
    # torch computes the last few numbers of a tensor by themselves, with other last bits.
    assert nmse(found, computed(a, data, tokens, cut)) < 1e-12
