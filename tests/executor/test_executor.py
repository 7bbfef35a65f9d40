"""Steps cut into passes, stages, failures, kept graphs: mostly on the null device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backend import Buffers, Done, Pass, PassShape, Runner, Segment
from hetrun.errors import BackendError, BudgetError, Cancelled
from hetrun.executor import executor
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.plan import BUCKETS, PlanSet, make_plans
from tests.models import tiny
from tests.models.cases import GQA
from tests.support.nulldevice import NullDevice
from tests.support.rig import Rig, graph_of, placements, plan_set, rig, step

TOKENS = tiny.random_tokens(48)


def null_rig(
    ubatch: int = 512, deterministic: bool = False, context: int = 256, windows: Sequence[int] = ()
) -> tuple[Rig, NullDevice]:
    device = NullDevice()
    made = rig(
        GQA, {"null": device}, ubatch=ubatch, deterministic=deterministic, context=context, windows=windows
    )
    return made, device


def following(tokens: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """What the null device says of the wanted tokens."""
    return [(tokens[i] + 1) % tiny.VOCAB for i in wanted]


# --- passes

LENGTH = st.integers(0, 40)


@st.composite
def texts(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """Tokens of some sequences and which of them are wanted."""
    out = []
    for _ in range(draw(st.integers(0, 4))):
        n = draw(LENGTH)
        tokens = draw(st.lists(st.integers(0, tiny.VOCAB - 1), min_size=n, max_size=n))
        everything = draw(st.booleans())
        wanted = (
            range(n)
            if everything
            else sorted(draw(st.sets(st.sampled_from(range(n)), max_size=4)) if n else ())
        )
        out.append((tokens, list(wanted)))
    return out


@given(steps=st.lists(texts(), min_size=1, max_size=2), ubatch=st.sampled_from((1, 2, 5, 16, 17, 64, 512)))
@settings(max_examples=60)
def test_every_token_runs_once_in_order_within_the_limits(
    steps: list[list[tuple[list[int], list[int]]]], ubatch: int
) -> None:
    made, device = null_rig(ubatch)
    seen: dict[int, list[int]] = {}
    for texts in steps:
        chunks = [(made.kv.alloc(), tokens, wanted) for tokens, wanted in texts]
        device.passes.clear()
        logits = made.step(*chunks)
        expected = [t for _, tokens, wanted in chunks for t in following(tokens, wanted)]
        assert logits.argmax(-1).tolist() == expected
        assert logits.shape == (len(expected), tiny.VOCAB)
        ran = [t for work in device.passes for t in work.tokens.tolist()]
        assert ran == [t for _, tokens, _ in chunks for t in tokens]
        for work in device.passes:
            check_pass(work, ubatch)
        for seq, tokens, _ in chunks:
            seen[seq] = tokens
    assert {seq: made.kv.length(seq) for seq in seen} == {seq: len(tokens) for seq, tokens in seen.items()}


def check_pass(work: Pass, ubatch: int) -> None:
    assert 0 < len(work.tokens) <= ubatch
    assert len(work.wanted) <= max(executor.SMALL, ubatch // 4)
    borders = [0, *(p.b for p in work.parts)]
    assert [p.a for p in work.parts] == borders[:-1]
    (slots,) = work.slots
    assert borders[-1] == len(work.tokens) == len(slots) == len(work.positions)
    for p in work.parts:
        mine = work.wanted[p.wanted_a : p.wanted_b]
        assert ((mine >= p.a) & (mine < p.b)).all()
        assert (np.diff(mine) > 0).all()
        (view,) = p.kv
        assert work.positions[p.a : p.b].tolist() == list(range(view.length - (p.b - p.a), view.length))
        assert slots[p.a : p.b].tolist() == view.rows[view.length - (p.b - p.a) :].tolist()
    assert work.parts[-1].wanted_b == len(work.wanted)


def test_sequences_go_on_where_they_were() -> None:
    made, device = null_rig()
    a, b = made.kv.alloc(), made.kv.alloc()
    made.step((a, [1, 2, 3], []), (b, [4], []))
    made.step((b, [5, 6], [1]), (a, [7], [0]))
    assert device.passes[-1].positions.tolist() == [1, 2, 3]
    assert [p.kv[0].length for p in device.passes[-1].parts] == [3, 4]


def test_several_passes_of_one_shape_keep_their_own_results() -> None:
    """Runners may leave their results in memory of their own, where the next pass overwrites them."""
    made, _ = null_rig(ubatch=16)
    tokens = list(range(64))
    assert made.logits(made.kv.alloc(), tokens).argmax(-1).tolist() == following(tokens, tokens)

    class OneMemory(NullDevice):
        def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
            return Reusing(super().compile(segment, shape, buffers, kv), segment)

    made = rig(GQA, {"null": OneMemory()}, ubatch=16)
    assert made.logits(made.kv.alloc(), tokens).argmax(-1).tolist() == following(tokens, tokens)


class Reusing:
    """Gives results out in the same arrays every time, as a ggml graph does."""

    def __init__(self, inner: Runner, segment: Segment) -> None:
        self._inner, self._segment = inner, segment
        self._arrays: dict[str, np.ndarray] = {}

    def submit(self, work: Pass) -> Done:
        done = self._inner.submit(work)
        for value in self._segment.writes:
            array = self._arrays.setdefault(value.name, np.empty_like(work.values[value.name]))
            array[:] = work.values[value.name]
            work.values[value.name] = array
        return done

    def close(self) -> None:
        self._inner.close()


def test_deterministic_is_one_row_a_pass() -> None:
    made, device = null_rig(deterministic=True)
    a, b = made.kv.alloc(), made.kv.alloc()
    logits = made.step((a, [1, 2, 3], [0, 2]), (b, [9, 8], [1]))
    assert logits.argmax(-1).tolist() == [2, 4, 9]
    assert [work.tokens.tolist() for work in device.passes] == [[1], [2], [3], [9], [8]]
    assert [len(work.wanted) for work in device.passes] == [1, 0, 1, 0, 1]


def test_a_sequence_comes_once_in_a_step() -> None:
    made, _ = null_rig()
    a = made.kv.alloc()
    with pytest.raises(ValueError, match="one chunk for each of its sequences"):
        made.step((a, [1], []), (a, [2], []))
    assert made.kv.length(a) == 0


# --- failures


class Failing(NullDevice):
    """Raises in the n-th pass."""

    def __init__(self, error: BaseException, n: int) -> None:
        super().__init__()
        self._error, self._left = error, n

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        self._left -= 1
        if self._left == 0:
            raise self._error
        return super().compile(segment, shape, buffers, kv)


@pytest.mark.parametrize("error", [BackendError("out of order"), Cancelled("stop"), KeyboardInterrupt()])
def test_a_step_that_fails_leaves_every_sequence_as_long_as_it_was(error: BaseException) -> None:
    made = rig(GQA, {"null": Failing(error, 3)}, ubatch=16)
    a, b = made.kv.alloc(), made.kv.alloc()
    made.step((a, TOKENS[:16], []))
    with pytest.raises(type(error)):
        made.step((a, TOKENS[:14], []), (b, TOKENS[:5], [4]))
    assert (made.kv.length(a), made.kv.length(b)) == (16, 0)
    logits = made.step((a, TOKENS[:14], []), (b, TOKENS[:5], [4]))
    assert logits.argmax(-1).tolist() == following(TOKENS, [4])
    assert (made.kv.length(a), made.kv.length(b)) == (30, 5)


def test_a_cache_that_is_full_leaves_every_sequence_as_long_as_it_was() -> None:
    made, device = null_rig(context=32)
    a, b = made.kv.alloc(), made.kv.alloc()
    made.step((a, TOKENS[:30], []))
    with pytest.raises(BudgetError):
        made.step((a, TOKENS[:2], []), (b, [1] * 300, []))
    assert (made.kv.length(a), made.kv.length(b)) == (30, 0)
    assert len(device.passes) == 1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("windows", [(10, 0), (10, 20)])
def test_a_step_of_more_tokens_than_a_window_has_rows_for(
    windows: tuple[int, int], deterministic: bool
) -> None:
    """The null device checks that attention finds every position that it must see, and no other."""
    made, device = null_rig(16, deterministic, 1024, windows)
    a, b = made.kv.alloc(), made.kv.alloc()
    text = [i % 50 for i in range(700)]
    logits = made.step((a, text, [0, 699]), (b, text[:5], [4]))
    assert logits.argmax(-1).tolist() == [*following(text, [0, 699]), *following(text, [4])]
    assert (made.kv.length(a), made.kv.length(b)) == (700, 5)
    assert max(len(work.tokens) for work in device.passes) == (1 if deterministic else 16)
    assert made.kv.groups[-1].window == max(windows)
    if all(windows):
        assert made.kv.groups[-1].used_rows <= 2 * 128


class FailingRun(NullDevice):
    """Raises when it has run `left` times more."""

    left = -1

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        return Counting(super().compile(segment, shape, buffers, kv), self)


class Counting:
    """A runner that its device counts."""

    def __init__(self, inner: Runner, device: FailingRun) -> None:
        self._inner, self._device = inner, device

    def submit(self, work: Pass) -> Done:
        self._device.left -= 1
        if self._device.left == 0:
            raise BackendError("out of order")
        return self._inner.submit(work)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_failure_in_the_middle_takes_a_window_back(deterministic: bool) -> None:
    """As long as a sequence gets no more than a pass holds, however many passes that takes."""
    device = FailingRun()
    made = rig(GQA, {"null": device}, ubatch=16, context=1024, deterministic=deterministic, windows=(10, 0))
    a, b = made.kv.alloc(), made.kv.alloc()
    for n in range(300):
        made.step((a, [n % 50], []))
        if n % 5:
            continue
        device.left = 7 if deterministic else 1
        with pytest.raises(BackendError):
            made.step((a, TOKENS[:12], []), (b, TOKENS[:3], []))
        assert (made.kv.length(a), made.kv.length(b)) == (n + 1, 0)
    assert made.logits(a, [6, 7]).argmax(-1).tolist() == [7, 8]


def test_a_sequence_whose_window_is_lost_begins_anew() -> None:
    device = FailingRun()
    made = rig(GQA, {"null": device}, ubatch=16, context=1024, windows=(10, 0))
    a, b = made.kv.alloc(), made.kv.alloc()
    made.step((a, [1] * 40, []), (b, [1] * 40, []))
    device.left = 20
    with pytest.raises(BackendError):
        made.step((b, [2] * 5, []), (a, [3] * 500, []))
    assert (made.kv.length(a), made.kv.length(b)) == (0, 40)
    assert made.logits(a, [5, 6]).argmax(-1).tolist() == [6, 7]
    assert made.logits(b, [5, 6]).argmax(-1).tolist() == [6, 7]


def test_an_interpreted_segment_hears_a_cancel_between_two_ops() -> None:
    device = NullDevice()
    made = rig(GQA, {"null": device})
    a = made.kv.alloc()
    device.cancel()
    with pytest.raises(Cancelled):
        made.step((a, TOKENS, [47]))
    assert made.kv.length(a) == 0
    device.rearm()
    assert made.step((a, TOKENS, [47])).argmax(-1).tolist() == following(TOKENS, [47])


# --- what is kept


def test_the_shapes_that_were_used_least_lately_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "KEPT", (2, 1))
    made, device = null_rig()
    a = made.kv.alloc()

    def kept(*lengths: int) -> set[int]:
        for n in lengths:
            made.step((a, TOKENS[:n], []))
        return {r.shape.tokens for r in device.open}

    assert kept(1, 2, 1, 3) == {1, 3}
    assert kept(20) == {1, 3, 20}
    assert kept(21, 1) == {1, 3, 21}
    assert len(device.runners) == 5
    made.close()
    assert device.open == []
    assert device.closed


def test_graphs_of_long_passes_go_when_nothing_has_come_for_a_while() -> None:
    made, device = null_rig()
    a = made.kv.alloc()
    for n in (1, 2, 20, 40):
        made.step((a, TOKENS[:n], []))
    made.executor.rest()
    assert {r.shape.tokens for r in device.open} == {1, 2}
    assert made.logits(a, TOKENS[:20]).argmax(1).tolist() == following(TOKENS[:20], range(20))
    assert {r.shape.tokens for r in device.open} == {1, 2, 20}
    plans = made.executor.plans
    more = {bucket: replace(plan, threads=plan.threads + 1) for bucket, plan in plans.plans.items()}
    made.executor.adopt(replace(plans, plans=more))
    made.step((a, TOKENS[:2], []))
    made.executor.rest()
    assert [r.shape.tokens for r in device.open] == [2]


def test_a_pass_that_stands_aside_keeps_its_graph() -> None:
    made, device = null_rig()
    a, b = made.kv.alloc(), made.kv.alloc()

    def between() -> None:
        made.step((b, [1], []))
        made.executor.rest()

    made.executor.run(step(*[(a, TOKENS[:20], [19])]), between)
    assert {r.shape.tokens for r in device.open} == {1, 20}


class Small(NullDevice):
    """It has memory for two compiled segments."""

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        if len(self.open) == 2:
            raise BudgetError("no memory is left for a third")
        return super().compile(segment, shape, buffers, kv)


def test_what_ran_longest_ago_makes_room_for_what_runs_now() -> None:
    device = Small()
    made = rig(GQA, {"null": device}, ubatch=512, context=256)
    seq = made.kv.alloc()
    for n in (1, 2, 20, 3, 1):
        tokens = TOKENS[:n]
        assert made.logits(seq, tokens).argmax(1).tolist() == following(tokens, range(n))
    assert len(device.runners) == 5
    made.close()
    assert not device.open


def test_a_shape_is_compiled_once() -> None:
    made, device = null_rig()
    a, b = made.kv.alloc(), made.kv.alloc()
    for _ in range(3):
        made.step((a, [1], [0]), (b, [2], [0]))
    assert [r.shape.parts for r in device.runners] == [((1, 1), (1, 1))]


def test_another_plan_is_compiled_anew() -> None:
    made, device = null_rig()
    a = made.kv.alloc()
    made.step((a, [1], [0]))
    for _ in range(
        20
    ):  # each plan is gone before the next is made, and its place in memory may be taken again
        made.executor.plans = PlanSet({}, 512, "none")
        made.executor.plans = plan_set(made.graph, {"": "null"})
        made.step((a, [1], [0]))
    assert len(device.runners) == 21


def test_what_was_compiled_before_an_error_is_closed() -> None:
    made = rig(
        GQA,
        {"null": (good := NullDevice()), "bad": (bad := Failing(BackendError("no"), 1))},
        {"": "null", "output": "bad"},
    )
    bad.name = "bad"
    with pytest.raises(BackendError):
        made.step((made.kv.alloc(), [1], [0]))
    assert len(good.runners) == 1
    assert good.open == []


def test_threads_are_those_of_the_plan() -> None:
    device, graph = NullDevice(), graph_of(GQA)
    everywhere = placements({"": "null"})
    buckets = {b: (4 if b == "1" else 2, everywhere) for b in BUCKETS}
    plans = replace(plan_set(graph, {"": "null"}), plans=make_plans(graph, buckets))
    made = rig(GQA, {"null": device}, plans=plans)
    a = made.kv.alloc()
    for n in (1, 1, 2, 5, 1):
        made.step((a, TOKENS[:n], []))
    set_to = [n for i, n in enumerate(device.threads) if i == 0 or n != device.threads[i - 1]]
    assert set_to == [4, 2, 4]


def test_each_segment_is_measured_in_its_bucket() -> None:
    made = rig(GQA, {"null": NullDevice(), "other": NullDevice("other")}, {"": "null", "blk.0.ffn": "other"})
    a = made.kv.alloc()
    made.step((a, TOKENS[:20], []))
    made.step((a, [1], [0]))
    made.step((a, [2], [0]))
    found = {(k.segment, k.backend, k.bucket): (r.runs, r.tokens) for k, r in made.stats}
    segments = [s.name for s in made.executor.plans.plan(1).segments]
    assert len(segments) == 3
    assert segments[1] == "blk.0.ffn"
    expected = {}
    for name in segments:
        backend = "other" if name == "blk.0.ffn" else "null"
        expected[name, backend, "17-32"] = (1, 20)
        expected[name, backend, "1"] = (2, 2)
    assert found == expected
    assert made.stats.segments == 9, "each that begins is a sign of life"
    assert all(0 < r.best <= r.seconds for _, r in made.stats)


def test_a_step_that_was_built_by_hand() -> None:
    built = step((0, [1, 2], [1]), (1, [3], []))
    assert (built.tokens, built.wanted) == (3, 1)
