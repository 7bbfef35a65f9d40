"""Attention through torch's kernel against the reference, which computes in float32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backend import Pass, SequencePart
from hetrun.backends.reference.attention import attention
from hetrun.graph import KvShape, Op, Rows, Value
from hetrun.graph.ops import Attention
from hetrun.graph.quant import by_name
from hetrun.memory.kv.cache import KvCache
from tests.support.examples import examples
from tests.support.tiers import first

torch = pytest.importorskip("torch")
ours = pytest.importorskip("hetrun.backends.amx.attention")

# bf16 has 8 bits: a number is off by 1/512 of itself at most, 1/900 on average (root of the mean square).
# q, k, v, the probabilities and the result are rounded; what scores are off by grows with the scores.
LIMIT = 1.5e-2


@dataclass(frozen=True)
class Case:
    """Sequences of a pass: tokens before, tokens now, which of these are wanted; heads; what they see."""

    parts: tuple[tuple[int, int, tuple[int, ...]], ...]
    kv_heads: int
    group: int
    dim: int
    window: int
    softcap: float
    rows: Rows
    kv_type: str
    forked: bool
    dtype: str
    first: int  # KV heads of the layer before those of the op
    sinks: bool
    seed: int


@st.composite
def parts(draw: st.DrawFn, most: int) -> tuple[int, int, tuple[int, ...]]:
    now = draw(st.one_of(st.integers(1, 6), st.integers(1, most)))
    wanted = draw(st.sets(st.integers(0, now - 1), max_size=8) | st.just(set(range(now))))
    return draw(st.integers(0, 2 * most)), now, tuple(sorted(wanted))


CASES = st.builds(
    Case,
    parts=st.lists(parts(150), min_size=1, max_size=3).map(tuple),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([16, 32, 64, 96]),
    window=st.sampled_from([0, 0, 1, 7, 40, 100, 1000]),
    softcap=st.sampled_from([0.0, 0.0, 5.0]),
    rows=st.sampled_from(["tokens", "wanted"]),
    kv_type=st.sampled_from(["F16", "F16", "F32", "Q8_0"]),
    forked=st.booleans(),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    first=st.sampled_from([0, 0, 1]),
    sinks=st.booleans(),
    seed=st.integers(0, 1 << 30),
)


def check(case: Case, spoil: bool = False) -> None:
    """Both give the same on the same sequences, and write the same rows.

    With `spoil` others use the scratch's memory whenever they may.
    """
    if case.kv_type == "Q8_0" and case.dim % 32:
        return
    rng = np.random.default_rng(case.seed)
    a = Attention(
        0,
        case.kv_heads * case.group,
        case.kv_heads,
        case.dim,
        case.dim**-0.5,
        case.window,
        case.softcap,
        case.first,
    )
    caches = [_filled(case, np.random.default_rng(case.seed)) for _ in range(2)]
    tokens = sum(now for _, now, _ in case.parts)
    wanted = _wanted(case)
    q, k, v = (Value(name, 1, "tokens") for name in "qkv")
    op = Op("attention", (Value("q", 1, case.rows), k, v), q, (), a, "test")
    n_q = tokens if case.rows == "tokens" else len(wanted)
    kv_width = case.kv_heads * case.dim
    shapes = ((n_q, kv_width * case.group), (tokens, kv_width), (tokens, kv_width))
    # What both are given is what the type can say.
    x = [torch.from_numpy(rng.standard_normal(s, np.float32)).to(getattr(torch, case.dtype)) for s in shapes]
    numbers = [y.float().numpy() for y in x]
    scratch = ours.AttentionScratch()
    (kv_a, sequences_a), (kv_b, sequences_b) = caches
    work_a, work_b = _pass(case, kv_a, sequences_a, wanted), _pass(case, kv_b, sequences_b, wanted)
    if spoil:
        work_b.between = lambda: _spoil(scratch._buffers.values())
    sinks = torch.from_numpy(rng.standard_normal((1, a.n_heads), np.float32)) if case.sinks else None
    given = [] if sinks is None else [sinks.numpy()]
    expected = attention(op, numbers, given, work_a, kv_a)
    found = ours.attend(op, x[0], [x[1], x[2]], sinks, work_b, kv_b, scratch)
    assert found.dtype == x[0].dtype
    for one, other in zip(kv_a.tables[0], kv_b.tables[0], strict=True):
        np.testing.assert_array_equal(one.raw, other.raw)
    result = found.float().numpy()
    assert np.isfinite(result).all()
    if len(expected):
        size = np.sqrt(np.mean(np.square(expected), axis=1, keepdims=True))
        assert np.sqrt(np.mean(np.square((result - expected) / size))) < LIMIT


def _spoil(buffers: Iterable[Any]) -> None:
    for buffer in buffers:
        buffer.fill_(torch.nan)


def _filled(case: Case, rng: np.random.Generator) -> tuple[KvCache, list[int]]:
    """Sequences with what they hold before the pass; forks share and scatter their blocks."""
    layer_heads = case.kv_heads + case.first
    most = max(before + now for before, now, _ in case.parts) + 64
    kv = KvCache({0: KvShape(layer_heads, case.dim, case.window)}, by_name(case.kv_type), most, 8, most)
    sequences: list[int] = []
    parent = kv.alloc()
    for before, _, _ in case.parts:
        seq = kv.fork(parent) if case.forked and kv.length(parent) <= before else kv.alloc()
        while (length := kv.length(seq)) < before:
            n = min(before - length, 33)
            slots = kv.extend(seq, n)[0]
            for table in kv.tables[0]:
                table.write(slots, rng.standard_normal((n, layer_heads * case.dim), np.float32))
            if case.forked:  # blocks of another sequence come between
                parent = kv.fork(seq) if not sequences and kv.length(seq) < 70 else parent
        sequences.append(seq)
    return kv, sequences


def _wanted(case: Case) -> np.ndarray:
    starts = np.cumsum([0] + [now for _, now, _ in case.parts])
    return np.array(
        [s + i for s, (_, _, own) in zip(starts, case.parts, strict=False) for i in own], np.int64
    )


def _pass(case: Case, kv: KvCache, sequences: list[int], wanted: np.ndarray) -> Pass:
    slots, parts, at, asked, positions = [], [], 0, 0, []
    for seq, (before, now, own) in zip(sequences, case.parts, strict=True):
        slots.append(kv.extend(seq, now)[0])
        view = kv.views(seq, before, before + now)
        parts.append(SequencePart(at, at + now, asked, asked + len(own), view))
        positions.append(np.arange(before, before + now))
        at, asked = at + now, asked + len(own)
    return Pass(
        np.zeros(at, np.int64), np.concatenate(positions), (np.concatenate(slots),), wanted, tuple(parts)
    )


@settings(max_examples=examples(40))
@given(CASES)
def test_as_the_reference(case: Case) -> None:
    check(case)


@settings(max_examples=examples(40))
@given(CASES, st.integers(1, 70), st.sampled_from([0, 8, 1000]), st.sampled_from([300, 3000, 1 << 20]))
def test_however_it_is_cut(case: Case, chunk: int, few: int, small: int) -> None:
    """Long passes, much of the past and large masks are cut: the same with few rows and small limits."""
    rows = mock.patch.multiple(ours, CHUNK_ROWS=chunk, BEGIN_ROWS=chunk, WHOLE_ROWS=few, HALF_ROWS=few)
    sizes = mock.patch.multiple(
        ours, PIECE_BYTES=64 * small, MASK_BYTES=4 * small, MASKS_BYTES=9 * small, STAGE_BYTES=small
    )
    with rows, sizes:
        check(case)


@settings(max_examples=examples(40))
@given(CASES, st.sampled_from([30, 100]))
def test_others_may_use_the_scratch_between_two_pieces(case: Case, keys: int) -> None:
    most = max(now for _, now, _ in case.parts) * case.kv_heads * case.group * case.dim
    with mock.patch.multiple(ours, ASIDE=keys * most):
        check(case, spoil=True)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=40, unique=True).map(sorted),
    st.sampled_from([0, 1, 5, 64, 500]),
    st.integers(1, 4),
    st.integers(1, 16),
)
def test_strips_have_every_key_once(ends: list[int], window: int, group: int, chunk: int) -> None:
    seen = np.zeros((len(ends), max(ends)), int)
    with mock.patch.multiple(ours, CHUNK_ROWS=chunk, WHOLE_ROWS=4):
        for s in ours.strips(np.array(ends), window, group):
            seen[s.a : s.b, s.lo : s.hi] += 1
            if not s.masked:
                assert all(s.hi <= end and (not window or s.lo >= end - window) for end in ends[s.a : s.b])
    for row, end in zip(seen, ends, strict=True):
        assert (row[max(0, end - window) if window else 0 : end] == 1).all()
    assert seen.max() == 1


@pytest.mark.parametrize("masks", first([(1 << 20, 140), (ours.MASKS_BYTES, 600)]), ids=["small", "whole"])
def test_scratch_is_used_again_and_says_what_it_holds(masks: tuple[int, int]) -> None:
    most, end = masks
    scratch = ours.AttentionScratch()
    taken = scratch.take("k", 100, 64, torch.bfloat16)
    assert scratch.take("k", 50, 64, torch.bfloat16).data_ptr() == taken.data_ptr()
    assert scratch.nbytes == 100 * 64 * 2
    ends = np.arange(1, 101)
    mask = scratch.mask(ends, 100, 0, 3, torch.bfloat16)
    assert scratch.mask(ends, 100, 0, 3, torch.bfloat16) is mask
    assert scratch.nbytes == 100 * 64 * 2 + 3 * 100 * 100 * 2
    with mock.patch.multiple(ours, MASKS_BYTES=most):
        for n in range(101, end):
            scratch.mask(ends, n, 0, 3, torch.bfloat16)
        assert scratch.nbytes <= ours.MASKS_BYTES + 100 * 64 * 2
