"""Short convolutions and gated delta nets in C, for each set of instructions that
this CPU has, against numpy's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backend import Floats, Pass, SequencePart
from hetrun.backends.llamacpp.kernels import delta_net as module
from hetrun.backends.llamacpp.kernels.delta_net import (
    FIELDS,
    Convolution,
    DeltaNets,
    DeltaRule,
    PassStates,
    delta_nets,
)
from hetrun.backends.reference import delta_net as reference
from hetrun.graph import KvShape, Op, StateShape, Value
from hetrun.graph.ops import CausalConv, DeltaNet
from hetrun.graph.quant import by_name
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.kv.states import NONE, StateView
from tests.support.examples import examples

BUILT = delta_nets()
pytestmark = pytest.mark.skipif(BUILT is None, reason="hetrun was installed without a C compiler")
LEVELS = range((BUILT.best if BUILT else 0) + 1)
NODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
SLOTS = 16
GUARD = 64  # floats behind memory, which must stay as they are
# The largest error of a number, in parts of a usual one: some roundings of float32.
CLOSE = 1e-5
NOTHING = np.empty(0, np.int64)

Layer = CausalConv | DeltaNet


def library() -> DeltaNets:
    assert BUILT is not None
    return BUILT


@cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4)


@dataclass(frozen=True)
class Given:
    """What a layer gets: its inputs and its weights."""

    x: tuple[Floats, ...]
    w: tuple[Floats, ...]

    def rows(self, a: int, b: int) -> Given:
        return replace(self, x=tuple([x[a:b] for x in self.x]))


@dataclass(frozen=True)
class Tokens:
    """`n` tokens of a sequence in a pass, where its state is read, and where it is written."""

    n: int
    read: int
    write: dict[int, int]  # slots, by the number of tokens before them

    @property
    def view(self) -> StateView:
        return StateView(self.read, np.array([self.write.get(i + 1, NONE) for i in range(self.n)], np.int64))


def kind_of(a: Layer) -> str:
    return "causal_conv" if isinstance(a, CausalConv) else "delta_net"


def states(a: Layer, seed: int = 0) -> KvCache:
    """A cache whose slots hold anything, as sequences that have come far have them; the filling is zeros."""
    kv = KvCache(
        {1: KvShape(1, 32)},
        by_name("F32"),
        64,
        4,
        64,
        states={0: StateShape({"other": 3, kind_of(a): a.floats})},
    )
    table = kv.state(0, kind_of(a))[:SLOTS]
    table[:] = np.random.default_rng(seed).standard_normal(table.shape, dtype=np.float32)
    if isinstance(a, DeltaNet):
        table *= np.float32(a.k_dim**-0.5)
        for state in table:
            state.reshape(-1, a.row)[:, a.k_dim :] = 0
    return kv


def parts(tokens: Sequence[Tokens]) -> tuple[SequencePart, ...]:
    ends = np.cumsum([t.n for t in tokens]).tolist()
    return tuple([SequencePart(b - t.n, b, 0, 0, (), t.view) for t, b in zip(tokens, ends, strict=True)])


def expected(a: Layer, data: Given, tokens: Sequence[Tokens], kv: KvCache) -> Floats:
    """What the reference makes of it; states in the cache change."""
    work = Pass(NOTHING, NOTHING, (), NOTHING, parts(tokens))
    op = Op(kind_of(a), (), Value("out", 1, "tokens"), (), a, "test")
    function = reference.causal_conv if isinstance(a, CausalConv) else reference.delta_net
    return function(op, list(data.x), list(data.w), work, kv)


def wide(x: Floats, gap: int) -> Floats:
    """Rows with something between them that is not to be read."""
    found = np.full((len(x), x.shape[1] + gap), np.nan, np.float32)
    found[:, : x.shape[1]] = x
    return found


def computed(
    a: Layer,
    data: Given,
    tokens: Sequence[Tokens],
    kv: KvCache,
    level: int,
    threads: int = 1,
    slots: int | None = None,
    gap: int = 0,
) -> Floats:
    """What the library makes of it; states in the cache change."""
    lib, slots = library(), slots or threads
    of_pass = parts(tokens)
    sequences = np.array([(p.a, p.b, t.read) for p, t in zip(of_pass, tokens, strict=True)], np.int64)
    assert sequences.shape == (len(tokens), FIELDS)
    write = np.concatenate([t.view.write for t in tokens])
    common = PassStates(n=len(tokens), sequences=sequences.ctypes.data, write=write.ctypes.data)
    xs, table = [wide(x, gap + i) for i, x in enumerate(data.x)], kv.state(0, kind_of(a))
    width = a.width if isinstance(a, CausalConv) else a.v_width
    out = np.full((len(xs[0]), width + gap), 7, np.float32)
    size = lib.scratch(a.row) if isinstance(a, DeltaNet) else 0
    scratch, counters = np.full(size * slots + GUARD, 7, np.float32), np.zeros(2, np.int32)
    shared = {
        "pass_states": ctypes.pointer(common),
        "states": table.ctypes.data,
        "stride": table.strides[0] // 4,
        "x": xs[0].ctypes.data,
        "out": out.ctypes.data,
        "x_stride": xs[0].shape[1],
        "out_stride": width + gap,
        "level": level,
    }
    call: Convolution | DeltaRule
    if isinstance(a, CausalConv):
        weights = {name: w.ctypes.data for name, w in zip(("kernel", "bias"), data.w, strict=False)}
        call = Convolution(**shared, **weights, width=a.width, taps=a.kernel, silu=a.silu)
    else:
        names = ("k_heads", "v_heads", "k_dim", "v_dim", "row", "tiled", "mamba")
        dims = {name: getattr(a, name) for name in names}
        dims |= dict(zip(("q_at", "k_at", "v_at"), a.columns, strict=True))
        call = DeltaRule(
            **shared,
            **dims,
            decay=xs[1].ctypes.data,
            rate=xs[2].ctypes.data,
            decays=data.w[0].ctypes.data,
            biases=data.w[1].ctypes.data,
            skips=data.w[2].ctypes.data if a.mamba else None,
            decay_stride=xs[1].shape[1],
            rate_stride=xs[2].shape[1],
            log=a.log,
            scratch=scratch.ctypes.data,
            scratch_size=size,
            slots=slots,
            counters=counters.ctypes.data,
            eps=a.eps,
        )
    # Through an address: with the library's own functions one thread would wait for the other.
    function = NODE(lib.convolve_address if isinstance(a, CausalConv) else lib.remember_address)
    list(pool().map(lambda i: function(None, i, threads, ctypes.addressof(call)), range(threads)))
    assert not counters.any()  # ready for the next call
    assert (scratch[size * slots :] == 7).all()
    assert (out[:, width:] == 7).all()
    return out[:, :width]


def kept(a: Layer, kv: KvCache) -> Floats:
    """All slots, also those that nothing was to be written into."""
    return kv.state(0, kind_of(a))[:SLOTS].copy()


def numbers(a: Layer, n: int, seed: int = 1) -> Given:
    """Of unit size; what decays does so."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Floats:
        return rng.standard_normal(shape, dtype=np.float32)

    if isinstance(a, CausalConv):
        kernel = normal(a.width, a.kernel) / np.float32(a.kernel**0.5)
        return Given((normal(n, a.width),), (kernel,) if a.silu else (kernel, normal(a.width, 1)))
    decays = 0.5 * normal(1, a.v_heads) if a.log else -rng.uniform(0.05, 1, (1, a.v_heads))
    x = normal(n, 2 * a.k_width + a.v_width), normal(n, a.v_heads), normal(n, a.v_heads)
    vectors = normal(2 if a.mamba else 1, 1, a.v_heads)
    return Given(x, (decays.astype(np.float32), *vectors))


def error(found: Floats, right: Floats, least: float = 0.0) -> float:
    """The largest one, in parts of what numbers usually are, or of the least that they are taken for."""
    usual = np.sqrt(np.square(right, dtype=np.float64).mean())
    return float(np.abs(found - right).max() / max(usual, least))


def check(
    a: Layer, data: Given, tokens: Sequence[Tokens], threads: int = 1, gap: int = 0, least: float = 0.0
) -> None:
    """With any instructions the library makes of it what the reference does, and leaves the same states."""
    kv = states(a)
    right = expected(a, data, tokens, kv)
    kept_right = kept(a, kv)
    assert np.isfinite(right).all()
    written = {slot for t in tokens for slot in t.write.values()}
    for level in LEVELS:
        kv = states(a)
        assert error(computed(a, data, tokens, kv, level, threads, gap=gap), right, least) < CLOSE, level
        for slot, (ours, reference_s) in enumerate(zip(kept(a, kv), kept_right, strict=True)):
            if slot in written:
                assert error(ours, reference_s, least) < CLOSE, (level, slot)
            else:
                assert np.array_equal(ours, reference_s), (level, slot)


NETS = {
    "one number": DeltaNet(0, 2, 2, 24, 1, log=True),
    "neighbours": DeltaNet(0, 2, 4, 32, 16, log=True),
    "tiled": DeltaNet(0, 2, 4, 32, 20, tiled=True),
    "odd": DeltaNet(0, 2, 6, 24, 20, log=True, eps=1e-5),
    "odd tiled": DeltaNet(0, 3, 6, 24, 16, tiled=True, log=True),
    "usual": DeltaNet(0, 1, 2, 128, 128, log=True),
    "usual tiled": DeltaNet(0, 2, 4, 128, 20, tiled=True),
    "mamba": DeltaNet(0, 2, 4, 128, 20, log=True, mamba=True),
    "odd mamba": DeltaNet(0, 1, 3, 24, 16, mamba=True),
    "wide": DeltaNet(0, 1, 1, 128, 16),
    "tall": DeltaNet(0, 1, 3, 32, 128),
    "widest": DeltaNet(0, 1, 1, 4096, 1, log=True),  # that a model may have
}
CONVOLUTIONS = {
    "of two": CausalConv(0, 2, 16),
    "of three": CausalConv(0, 3, 37),
    "of four": CausalConv(0, 4, 300),  # more columns than are gone through at once
    "of three, with a bias": CausalConv(0, 3, 37, silu=False),
    "of four, with a bias": CausalConv(0, 4, 40, silu=False),
    "of four, odd": CausalConv(0, 4, 5),
    "of seven": CausalConv(0, 7, 129),
    "of most": CausalConv(0, 64, 17),  # that a model may have
}
LAYERS: dict[str, Layer] = {**NETS, **CONVOLUTIONS}
# Some are as many as are made ready at once, and one more or less.
COMPANIES: dict[str, tuple[Tokens, ...]] = {
    "a first token": (Tokens(1, NONE, {1: 0}),),
    "a token": (Tokens(1, 3, {1: 0}),),
    "two": (Tokens(2, 3, {1: 1, 2: 0}),),
    "31": (Tokens(31, NONE, {31: 0}),),
    "32": (Tokens(32, 5, {1: 1, 31: 2, 32: 0}),),
    "33": (Tokens(33, 5, {32: 1, 33: 0}),),
    "70": (Tokens(70, NONE, {10: 1, 33: 2, 64: 3, 65: 4, 70: 0}),),
    "in place": (Tokens(40, 5, {40: 5}),),
    "in place at once": (Tokens(1, 5, {1: 5}), Tokens(2, 6, {1: 7, 2: 6})),
    "several": (Tokens(3, NONE, {1: 0, 2: 1, 3: 2}), Tokens(1, 9, {1: 9}), Tokens(33, 10, {7: 11, 33: 12})),
    "forks": (Tokens(2, 8, {2: 0}), Tokens(5, 8, {5: 1}), Tokens(1, 8, {1: 2})),
}


def total(tokens: Sequence[Tokens]) -> int:
    return sum(t.n for t in tokens)


def same_bits(a: Layer, ours: KvCache, others: KvCache) -> bool:
    return np.array_equal(kept(a, ours), kept(a, others))


@pytest.mark.parametrize("company", COMPANIES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_as_the_reference_says(name: str, company: str) -> None:
    a, tokens = LAYERS[name], COMPANIES[company]
    threads = 1 + (len(name) + len(company)) % 3
    check(a, numbers(a, total(tokens)), tokens, threads, gap=3 * (threads % 2))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LAYERS)
def test_any_number_of_threads_computes_the_same_bits(name: str, level: int) -> None:
    a, tokens = LAYERS[name], COMPANIES["several"]
    data, alone = numbers(a, total(tokens)), states(a)
    found = computed(a, data, tokens, alone, level)
    for threads in (2, 3):
        together = states(a)
        assert np.array_equal(found, computed(a, data, tokens, together, level, threads, gap=5))
        assert same_bits(a, alone, together)


@pytest.mark.parametrize("level", LEVELS)
def test_threads_without_memory_leave_the_work_to_others(level: int) -> None:
    a, tokens = NETS["odd"], COMPANIES["33"]
    data, alone, together = numbers(a, 33), states(a), states(a)
    found = computed(a, data, tokens, alone, level)
    assert np.array_equal(found, computed(a, data, tokens, together, level, threads=3, slots=1))
    assert same_bits(a, alone, together)


@pytest.mark.parametrize("name", LAYERS)
@given(
    level=st.sampled_from(LEVELS),
    cuts=st.sets(st.integers(1, 69), max_size=6),
    threads=st.integers(1, 3),
    read=st.sampled_from((NONE, 5)),
)
@settings(max_examples=examples(20), deadline=None)
def test_the_bits_are_the_same_however_a_text_is_cut(
    name: str, level: int, cuts: set[int], threads: int, read: int
) -> None:
    a, marks = LAYERS[name], {10: 1, 33: 2, 64: 3}
    data, whole, cut = numbers(a, 70), states(a), states(a)
    right = computed(a, data, [Tokens(70, read, {**marks, 70: 0})], whole, level)
    found = []
    for begin, end in pairwise(sorted({0, *cuts, 70})):
        # Between two passes the state lies where it is in the end, or where it is kept.
        write = {p - begin: slot for p, slot in marks.items() if begin < p <= end}
        write.setdefault(end - begin, 0)
        tokens = [Tokens(end - begin, read, write)]
        found.append(computed(a, data.rows(begin, end), tokens, cut, level, threads))
        read = write[end - begin]
    assert np.array_equal(np.concatenate(found), right)
    assert same_bits(a, cut, whole)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LAYERS)
def test_company_changes_no_bit(name: str, level: int) -> None:
    a, tokens = LAYERS[name], COMPANIES["several"]
    data, together, apart = numbers(a, total(tokens)), states(a), states(a)
    found = computed(a, data, tokens, together, level)
    for part, of_one in zip(parts(tokens), tokens, strict=True):
        own = computed(a, data.rows(part.a, part.b), [of_one], apart, level)
        assert np.array_equal(own, found[part.a : part.b])
    assert same_bits(a, apart, together)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(("decay", "rate"), [(100, 100), (100, -100), (-100, 100), (-100, -100), (20, 20)])
def test_extreme_decays_and_rates(name: str, decay: float, rate: float) -> None:
    a, tokens = NETS[name], COMPANIES["33"]
    data, some = numbers(a, 33), np.zeros((33, a.v_heads), np.float32)
    some[1::2] = 1  # the others are as usual, so that something comes out in any case
    inputs = data.x[0], data.x[1] + some * np.float32(decay), data.x[2] + some * np.float32(rate)
    # What is nearly forgotten is e to a large power, which has the error of the power.
    check(a, Given(inputs, data.w), tokens, least=0.01)


@pytest.mark.parametrize("decay", [-100, 100])
@pytest.mark.parametrize("rate", [-100, 100])
def test_extremes_all_the_time(decay: float, rate: float) -> None:
    a, tokens = NETS["tiled"], COMPANIES["33"]
    x = numbers(a, 33).x[0]
    ones = np.ones((33, a.v_heads), np.float32)
    check(a, Given((x, decay * ones, rate * ones), numbers(a, 33).w), tokens, least=0.01)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LAYERS)
def test_of_zeros_come_zeros(name: str, level: int) -> None:
    a, tokens = LAYERS[name], COMPANIES["70"]
    data, kv = numbers(a, 70), states(a)
    weights = data.w[:1] if isinstance(a, CausalConv) else data.w  # a bias is not to be seen
    zeros = Given(tuple([np.zeros_like(x) for x in data.x]), weights)
    assert not computed(a, zeros, tokens, kv, level).any()
    assert not kept(a, kv)[list(tokens[0].write.values())].any()


def sizes_of(a: Layer) -> Sequence[float]:
    """Of inputs; Mamba's rule multiplies three of them, which float32 does not hold where they are large."""
    return (1e-30, 1e-15, 1e10) if isinstance(a, DeltaNet) and a.mamba else (1e-30, 1e-15, 1e15, 1e30)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LAYERS)
def test_inputs_of_any_size_give_numbers(name: str, level: int) -> None:
    a, tokens = LAYERS[name], COMPANIES["33"]
    for size in sizes_of(a):
        data, kv = numbers(a, 33), states(a)
        inputs = data.x[0] * np.float32(size), *data.x[1:]
        assert np.isfinite(computed(a, Given(inputs, data.w), tokens, kv, level)).all()
        assert np.isfinite(kept(a, kv)).all()


@pytest.mark.parametrize("level", LEVELS)
def test_silu_of_a_convolution_is_right_wherever_it_is(level: int) -> None:
    a = CausalConv(0, 2, 1001)
    x = np.linspace(-110, 110, a.width, dtype=np.float32).reshape(1, -1)
    weights = np.zeros((a.width, 2), np.float32)
    weights[:, 1] = 1
    found = computed(a, Given((x,), (weights,)), [Tokens(1, NONE, {1: 0})], states(a), level)
    exact = x.astype(np.float64)
    exact /= 1 + np.exp(-exact)
    # A result is of the size of 1e-36 and less where e to the power of -x is at its limit.
    assert (np.abs(found - exact) <= 1e-6 * np.abs(exact) + 1e-36).all()


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_learnt_is_known(level: int) -> None:
    """With nothing forgotten and all learnt, a key's value comes back when it is asked for."""
    a = DeltaNet(0, 1, 1, 32, 20)
    rng = np.random.default_rng(2)
    keys = np.linalg.qr(rng.standard_normal((32, 32)))[0].astype(np.float32)
    values = rng.standard_normal((32, 20), dtype=np.float32)
    asked = np.roll(keys, 5, axis=0) * np.float32(32**0.5)
    x = np.concatenate((asked, keys, values), axis=1)
    always = np.full((32, 1), 100, np.float32)
    weights = np.zeros((1, 1), np.float32)
    data = Given((x, np.zeros_like(always), always), (weights, weights))
    found = computed(a, data, [Tokens(32, NONE, {32: 0})], states(a), level)
    assert np.abs(found[:5]).max() < 1e-5  # these are asked for before they are told
    assert np.abs(found[5:] * np.float32(32**0.5) - values[:-5]).max() < 1e-4


def test_a_library_from_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAYOUT", module.LAYOUT + 8)
    module.delta_nets.cache_clear()
    assert delta_nets() is None
    monkeypatch.setattr(module, "NAME", "nothing.so")
    module.delta_nets.cache_clear()
    assert delta_nets() is None
    monkeypatch.undo()
    module.delta_nets.cache_clear()
    assert delta_nets() is not None
