"""Steps inside of steps: a long one stands aside for short ones, and the results do not show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetrun.backend import Available, Buffers, Done, Pass, PassShape, Runner, Segment, interpreter, registry
from hetrun.backend.op_profile import ActivityTimes
from hetrun.backends.llamacpp import preemption
from hetrun.backends.llamacpp.backend import LlamacppBackend
from hetrun.errors import Cancelled
from hetrun.executor import executor
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.costmodel import WorkTimes
from tests.models import tiny
from tests.models.cases import GQA
from tests.support.nulldevice import NullDevice
from tests.support.rig import Placed, Rig, plan_set, rig

TOKENS = tiny.random_tokens(200)
ON: dict[str, Placed] = {
    "llamacpp": {"": "llamacpp"},
    "amx": {"": "amx"},
    "both": {"": "llamacpp", "blk.0.ffn": "amx", "blk.1.attn": "amx"},
    "reference": {"": "reference"},
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models' passes would be one piece each."""
    monkeypatch.setattr(preemption, "PIECE_S", 1e-9)


@pytest.fixture(params=ON)
def made(request: pytest.FixtureRequest) -> Iterator[Rig]:
    names = sorted(set(ON[request.param].values()))
    known = registry.backends()
    missing = [n for n in names if n not in known or not isinstance(known[n].probe(), Available)]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not here")
    found = rig(GQA, {name: known[name].create() for name in names}, ON[request.param], kv_type="F16")
    yield found
    found.close()


def answers(made: Rig, n: int) -> list[int]:
    """Sequences of different lengths that are in the middle of an answer."""
    seqs = [made.kv.alloc() for _ in range(n)]
    for i, seq in enumerate(seqs):
        made.step((seq, TOKENS[i : 3 * i + 5], []))
    return seqs


class Others:
    """A step of one more token for each of some sequences, now and then."""

    def __init__(self, made: Rig, seqs: list[int], every: int = 1) -> None:
        self._made, self._seqs, self._every = made, seqs, every
        self.calls = 0
        self.results: list[np.ndarray] = []

    def __call__(self) -> None:
        self.calls += 1
        if self.calls % self._every == 0 and len(self.results) < 40:
            self.run()

    def run(self) -> None:
        token = TOKENS[len(self.results)]
        self.results.append(self._made.step(*((seq, [token], [0]) for seq in self._seqs)))


def test_steps_inside_of_a_step_give_what_they_give_one_after_the_other(made: Rig) -> None:
    prompt, wanted = TOKENS[:100], [50, 99]
    others = Others(made, answers(made, 3), every=2)
    long = made.kv.alloc()
    inside = [made.step((long, prompt, wanted), between=others), made.step((long, [7], [0]))]
    assert len(others.results) >= 5

    after = Others(made, answers(made, 3))
    for _ in others.results:
        after.run()
    again = made.kv.alloc()
    whole = [made.step((again, prompt, wanted)), made.step((again, [7], [0]))]
    for got, expected in zip(inside + others.results, whole + after.results, strict=True):
        assert np.array_equal(got, expected)


def test_a_step_inside_of_one_that_looks_alike(made: Rig) -> None:
    """Compiled segments keep values in memory of their own: each of the two needs its own."""
    outer, inner = answers(made, 2)
    a, b = made.kv.fork(outer), made.kv.fork(inner)
    expected = [made.step((a, [5], [0])), *(made.step((b, [n], [0])) for n in range(4))]
    got: list[np.ndarray] = []

    def between() -> None:
        if len(got) < 4:
            got.append(made.step((inner, [len(got)], [0])))

    got.insert(0, made.step((outer, [5], [0]), between=between))
    assert len(got) == 5
    for x, y in zip(got, expected, strict=True):
        assert np.array_equal(x, y)


def test_a_failure_in_between_leaves_everything_as_it_was(made: Rig) -> None:
    long, other = made.kv.alloc(), answers(made, 1)[0]
    fork = made.kv.fork(other)
    expected = [made.step((other, [3], [0])), made.step((long, TOKENS[:40], [39]))]
    made.kv.truncate(long, 0)
    calls = 0

    def between() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyError("someone's own fault")

    with pytest.raises(KeyError):
        made.step((long, TOKENS[:40], [39]), between=between)
    assert made.kv.length(long) == 0
    assert np.array_equal(made.step((fork, [3], [0])), expected[0])
    assert np.array_equal(made.step((long, TOKENS[:40], [39])), expected[1])


def test_a_cancel_in_between_ends_the_step_that_stood_aside(made: Rig) -> None:
    long, other = made.kv.alloc(), answers(made, 1)[0]
    calls = 0

    def between() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            for b in made.backends.values():
                b.cancel()
            with pytest.raises(Cancelled):  # the one that runs then is ended too, and is as long as before
                made.step((other, [3], [0]))
            assert made.kv.length(other) == 5

    with pytest.raises(Cancelled):
        made.step((long, TOKENS[:40], [39]), between=between)
    assert calls <= 4
    assert made.kv.length(long) == 0
    for b in made.backends.values():
        b.rearm()
    assert np.isfinite(made.step((long, TOKENS[:40], [39]), (other, [3], [0]))).all()


# --- what is kept


PLACED = {"": "one", "blk.0.ffn": "two"}


def null_rig() -> tuple[Rig, NullDevice, NullDevice]:
    """A model of three segments: one device, another, and the first again."""
    one, two = NullDevice("one"), NullDevice("two")
    made = rig(GQA, {"one": one, "two": two}, PLACED)
    return made, one, two


def test_what_stands_still_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for shapes that come meanwhile, nor for other plans; afterwards it may go."""
    monkeypatch.setattr(executor, "KEPT", (1, 1))
    made, one, two = null_rig()
    long, other = made.kv.alloc(), made.kv.alloc()
    sizes = iter((1, 30, 2, 40, 3, 50))

    def between() -> None:
        made.kv.truncate(other, 0)
        if n := next(sizes, 0):
            made.step((other, TOKENS[:n], [n - 1]))
        else:
            made.executor.adopt(plan_set(made.graph, PLACED))

    tokens = TOKENS[:20]
    assert made.step((long, tokens, [19]), between=between).argmax(-1).tolist() == [
        (tokens[-1] + 1) % tiny.VOCAB
    ]
    assert next(sizes, None) is None
    made.step((other, TOKENS[:21], []))
    made.executor.adopt(plan_set(made.graph, PLACED))
    made.step((other, TOKENS[:22], []))
    assert {r.shape.tokens for device in (one, two) for r in device.open} == {22}
    made.close()
    assert one.open == []


def test_a_shape_inside_of_itself_is_compiled_twice_and_no_more() -> None:
    made, one, _ = null_rig()
    a, b = made.kv.alloc(), made.kv.alloc()

    def between() -> None:
        made.step((b, [2], [0]))
        made.kv.truncate(b, 0)

    for _ in range(3):
        made.step((a, [1], [0]), between=between)
    assert len(one.runners) == 2 * 2


# --- whose time it is


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker(NullDevice):
    """Every segment takes a second for each token."""

    def __init__(self, name: str, clock: Clock) -> None:
        super().__init__(name)
        self.clock = clock

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        return Working(super().compile(segment, shape, buffers, kv), self.clock)


class Working:
    """A runner that takes time."""

    def __init__(self, inner: Runner, clock: Clock) -> None:
        self._inner, self._clock = inner, clock

    def submit(self, work: Pass) -> Done:
        self._clock.now += len(work.tokens)
        return self._inner.submit(work)

    def close(self) -> None:
        self._inner.close()


def test_the_time_of_steps_inside_is_not_that_of_the_step_around_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(executor, "perf_counter", clock)
    monkeypatch.setattr(interpreter, "perf_counter", clock)
    forecast = WorkTimes()
    devices = {"one": Worker("one", clock), "two": Worker("two", clock)}
    made = rig(GQA, devices, PLACED, forecast=forecast)
    a, b, c = (made.kv.alloc() for _ in range(3))
    besides = 0.0

    def innermost() -> None:
        clock.now += 1000
        made.step((c, [1, 2], [1]))
        made.kv.truncate(c, 0)

    def between() -> None:
        clock.now += 10000
        made.step((b, [1], [0]), between=innermost)
        made.kv.truncate(b, 0)

    for _ in range(2):
        made.step((a, TOKENS[:70], [69]), between=between)
        made.kv.truncate(a, 0)
        besides = max(besides, made.executor.between_s)
    seconds = {(k.bucket, r.seconds / r.runs) for k, r in made.stats}
    assert seconds == {("65-256", 70.0), ("2-4", 2.0), ("1", 1.0)}
    assert besides == 0.0
    assert made.stats.wait_seconds == 0.0
    known = [
        (work, n) for work in forecast.works() for n in (1, 70) if forecast.cell(work, n, (n + 1) / 2).runs
    ]
    assert len(known) >= 3
    for work, n in known:
        assert forecast.seconds(work, n, (n + 1) / 2) == pytest.approx(n)


# --- pieces of a graph


@given(st.lists(st.sampled_from([0.0, 0.0, 1e-4, 6e-4, 2e-3]), min_size=1, max_size=60))
def test_pieces_are_everything_and_end_behind_what_takes_time(times: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preemption, "PIECE_S", 1e-3)
        ends = preemption.cuts(times)
    assert ends == sorted(set(ends))
    assert ends[-1] == len(times)
    for a, b in zip([0, *ends], ends, strict=False):
        assert b == len(times) or (times[b - 1] and sum(times[a:b]) >= 1e-3)
        assert sum(times[a : b - 1]) < 1e-3 or b == len(times)


def ggml_rig() -> Rig:
    return rig(GQA, {"llamacpp": registry.backends()["llamacpp"].create()})


def graphs_of(made: Rig, monkeypatch: pytest.MonkeyPatch, between: Callable[[], None] | None) -> int:
    """How many graphs ggml was given for one pass."""
    device = made.backends["llamacpp"]
    assert isinstance(device, LlamacppBackend)
    graphs, compute = [], device.compute

    def counted(graph: int) -> None:
        graphs.append(graph)
        compute(graph)

    monkeypatch.setattr(device, "compute", counted)
    made.step((made.kv.alloc(), TOKENS[:30], [29]), between=between)
    return len(graphs)


def test_only_a_pass_that_others_wait_in_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ggml_rig()
    layers = len(made.kv.tables)
    assert graphs_of(made, monkeypatch, None) == 1
    assert graphs_of(made, monkeypatch, lambda: None) >= 4 * layers
    made.close()


def test_where_ggml_shows_no_pieces_a_pass_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_viewer", lambda lib: None)
    made = ggml_rig()
    assert graphs_of(made, monkeypatch, lambda: None) == 1
    made.close()


def test_short_passes_are_not_cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    made = ggml_rig()
    assert graphs_of(made, monkeypatch, lambda: None) <= 2
    made.close()


def test_the_times_of_pieces_are_seen_as_those_of_a_whole_pass() -> None:
    """The same nodes, and norms are computed with their products here as there."""
    made = ggml_rig()
    device = made.backends["llamacpp"]
    for between in (None, lambda: None):
        device.watch(spent := ActivityTimes())
        start = perf_counter()
        made.step((made.kv.alloc(), TOKENS[:30], [29]), between=between)
        took = perf_counter() - start
        assert 0 < spent.seconds["products"] < took  # a part of it, however long it is
        assert spent.seconds["attention"] > 0
        assert spent.seconds["norms"] > 0
    device.watch(None)
    made.close()
