"""What steps are expected to take: predicted and corrected, or measured by size."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given, strategies as st

from hetrun.engine.size_curve import SizeCurve
from hetrun.engine.step_time import (
    FORGOTTEN,
    PREDICTED_S,
    READ,
    REMEMBERED,
    StepShape,
    StepTimes,
    answering,
    longer,
    shape_of_chunks,
)
from hetrun.system.estimate import Estimate
from tests.support.step_times import Said, unpredicted
from tests.unit.test_estimate import FEW_STEPS, Noise, busy, idle, moved

samples = st.lists(st.tuples(st.integers(1, 1000), st.floats(1e-6, 10)), min_size=1)
shapes = st.lists(
    st.tuples(
        st.sampled_from(
            [answering(1), answering(3), answering(8), StepShape(1, 300, 300), StepShape(3, 202, 200)]
        )
        | st.builds(lambda n: StepShape(2, 2 + n, 0, n), st.integers(1, 30)),
        st.floats(1e-6, 10),
    ),
    max_size=40,
)


def seconds_of(shape: StepShape) -> float:
    """A machine: what steps really take."""
    return 0.003 + 0.0006 * shape.prompts + 0.001 * (shape.tokens - shape.prompts) + 1e-6 * shape.depth


def predicted(factor: float = 1.0) -> StepTimes:
    """A planner that predicts `factor` times as much as steps of the machine take."""
    return StepTimes(Said(lambda chunks: factor * seconds_of(shape_of_chunks(chunks))))


# --- by size


@given(seen=samples, sizes=st.tuples(st.floats(0, 5000), st.floats(0, 5000)))
def test_a_larger_size_never_takes_less(seen: list[tuple[int, float]], sizes: tuple[float, float]) -> None:
    curve = SizeCurve()
    for size, seconds in seen:
        curve.observe(size, seconds)
    small, large = (curve.at(size) for size in sorted(sizes))
    assert small is not None
    assert large is not None
    assert 0 <= small <= large * (1 + 1e-9)


def test_times_lie_on_lines_between_what_was_seen_and_follow_it() -> None:
    curve = SizeCurve()
    assert curve.at(3) is None
    curve.observe(4, 0.4)
    assert curve.at(2) == pytest.approx(0.2)
    assert curve.at(8) == pytest.approx(0.8)
    curve.observe(16, 0.8)
    assert curve.at(10) == pytest.approx(0.6)
    for _ in range(100):
        curve.observe(16, 1.6)
    assert curve.at(16) == pytest.approx(1.6, rel=0.01)


def test_sizes_between_are_learned_as_well() -> None:
    chance, curve = random.Random(1), SizeCurve()
    for _ in range(300):
        size = chance.randint(1, 900)
        curve.observe(size, 0.003 + 0.0006 * size)
    for size in (20, 100, 333, 512, 700):
        assert curve.at(size) == pytest.approx(0.003 + 0.0006 * size, rel=0.1)


@given(shapes, st.integers(1, 300), st.integers(0, 2000), st.integers(0, 60), st.data())
def test_unpredicted_steps_never_take_less_with_more_tokens(
    seen: list[tuple[StepShape, float]], answers: int, prompt: int, drafted: int, data: st.DataObject
) -> None:
    times = unpredicted()
    for shape, seconds in seen:
        times.observe(shape, seconds)
    more = data.draw(st.integers(0, 300))
    of = [StepShape(n + bool(p), n + p, p) for n, p in ((answers, prompt), (answers + more, prompt))]
    of += [StepShape(answers + 1, answers + p, p) for p in (prompt + 1, prompt + 1 + more)]
    for small, large in (of[:2], of[2:]):
        pair = times.seconds(small), times.seconds(large)
        assert (pair[0] is None) == (pair[1] is None)
        if pair[0] is not None and pair[1] is not None:
            assert 0 < pair[0] <= pair[1] * (1 + 1e-9)
    for shape in (*of, StepShape(answers, answers + drafted, 0, drafted)):
        found = times.estimate(shape)
        assert (found is None) == (times.seconds(shape) is None)
        if found:
            assert 0 < found.least <= found.seconds <= found.most


def test_nothing_is_said_before_anything_is_known() -> None:
    times = unpredicted()
    assert times.seconds(answering(1)) is None
    assert times.estimate(answering(1)) is None
    assert times.a_token(4) is None
    assert times.reading(100) is None
    times.observe(StepShape(1, 100, 100), 0.1)
    assert times.seconds(StepShape(2, 101, 100)) is None  # no answer was seen yet
    times.observe(StepShape(2, 101, 100), 0.13)
    assert times.seconds(answering(1)) == pytest.approx(0.03)
    assert times.foreseen(answering(1)) is None  # but no step is late by that
    assert times.seconds(answering(1)._replace(tokens=4, drafted=3)) == pytest.approx(0.03 * longer(1, 3))


# --- as expected


def told(times: StepTimes, noise: Noise, n: int, seed: int) -> list[tuple[Estimate, float]]:
    """What was expected of each of n steps, and what it took: answers, now and then a prompt beside them."""
    chance, found = random.Random(seed), []
    for i in range(n):
        shape = answering(1 + i // 50 % 3, i) if i % 20 else StepShape(1, 512, 512, 0, 256)
        seconds = seconds_of(shape) * noise(i, chance)
        if (expected := times.estimate(shape)) is not None:
            found.append((expected, seconds))
        times.observe(shape, seconds)
    return found


@pytest.mark.parametrize("make", [predicted, lambda: predicted(0.3), unpredicted])
@pytest.mark.parametrize("noise", [idle, busy])
@pytest.mark.parametrize("seed", range(3))
def test_nine_in_ten_steps_come_as_expected(make: Callable[[], StepTimes], noise: Noise, seed: int) -> None:
    found = told(make(), noise, 2000, seed)
    assert sum(e.least <= seconds <= e.most for e, seconds in found) >= 0.9 * len(found)


@pytest.mark.parametrize("make", [predicted, unpredicted])
@pytest.mark.parametrize("noise", [idle, busy])
def test_a_machine_that_others_use_now_and_then(make: Callable[[], StepTimes], noise: Noise) -> None:
    times, chance, found = make(), random.Random(1), list[tuple[Estimate, float]]()
    for i in range(1000):
        seconds = moved(noise, 200)(i, chance) * seconds_of(answering(2))
        if expected := times.estimate(answering(2)):
            found.append((expected, seconds))
        times.observe(answering(2), seconds)
    counted = [pair for i, pair in enumerate(found) if i < 200 or i % 200 >= FEW_STEPS]
    assert sum(e.least <= seconds <= e.most for e, seconds in counted) >= 0.9 * len(counted)
    each = [e.seconds / seconds_of(answering(2)) for e, _ in found]
    for at, level in ((200, 5), (400, 1), (600, 5), (800, 1)):
        assert median(each[at + FEW_STEPS : at + 4 * FEW_STEPS]) == pytest.approx(level, rel=0.35)


@pytest.mark.parametrize("make", [predicted, unpredicted])
def test_one_slow_step_moves_nothing(make: Callable[[], StepTimes]) -> None:
    times, chance = make(), random.Random(1)
    for _ in range(50):
        times.observe(answering(1), 0.004 * chance.lognormvariate(0, 0.03))
    before = times.seconds(answering(1))
    times.observe(answering(1), 0.08)
    assert times.seconds(answering(1)) == pytest.approx(before, rel=0.03)
    times.observe(answering(1), 0.004)
    assert times.seconds(answering(1)) == pytest.approx(before, rel=0.03)


# --- predictions


def test_a_prediction_is_corrected_by_the_steps_of_its_kind() -> None:
    times = StepTimes(Said(lambda chunks: 0.1 * sum(n for n, _ in chunks)))
    for _ in range(3):
        times.observe(answering(1), 0.3)
    assert times.seconds(answering(1)) == pytest.approx(0.3)
    assert times.seconds(answering(16)) == times.foreseen(answering(16)) == pytest.approx(1.6)
    drafted = StepShape(1, 4, 0, 3)
    assert times.seconds(drafted) == pytest.approx(1.2)  # like those without, until one was seen
    for _ in range(3):
        times.observe(drafted, 0.5)
    assert times.seconds(drafted) == pytest.approx(0.5)
    assert times.seconds(answering(1)) == pytest.approx(0.3)


def test_what_was_not_seen_for_long_is_forgotten_half_by_half() -> None:
    times, prompt = predicted(), StepShape(1, 512, 512, 0, 256)
    for _ in range(3):
        times.observe(prompt, 4 * seconds_of(prompt))
    for _ in range(FORGOTTEN):
        times.observe(answering(1), seconds_of(answering(1)))
    assert times.seconds(prompt) == pytest.approx(2 * seconds_of(prompt))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test may change."""
    found = [100.0]
    monkeypatch.setattr("hetrun.engine.step_time.perf_counter", lambda: found[0])
    return found


def test_predictions_are_asked_for_once_in_a_while(now: list[float]) -> None:
    model = Said(lambda chunks: 0.01)
    times = StepTimes(model)
    for depth in range(200):
        times.observe(answering(2, depth), 0.01)
        times.estimate(answering(2, depth))
    assert model.asked == 1
    for _ in range(200):
        now[0] += PREDICTED_S / 50
        times.observe(answering(2, 100), 0.01)
    assert model.asked == pytest.approx(1 + 4, abs=1)
    for n in range(1, 2 * REMEMBERED):
        times.seconds(answering(n))
    assert len(times._predicted) <= REMEMBERED


def test_what_the_planner_has_learned_does_not_count_twice(now: list[float]) -> None:
    """Others come, steps take five times as long, and later the planner knows."""
    model, prompt = Said(lambda chunks: 0.01 * sum(n for n, _ in chunks)), StepShape(1, 500, 500, 0, 250)
    other = StepShape(1, 490, 490, 0, 245)
    times = StepTimes(model)
    for _ in range(5):
        times.observe(answering(1), 0.05)
        times.observe(prompt, 25.0)
    model.say = lambda chunks: 0.05 * sum(n for n, _ in chunks)
    for renew in ("time", "plans"):
        now[0] += 2 * PREDICTED_S
        if renew == "plans":
            model.plans = object()
        else:
            times.observe(answering(1), 0.05)
        for shape, seconds in ((answering(1), 0.05), (prompt, 25.0), (other, 24.5)):
            assert times.seconds(shape) == pytest.approx(seconds)
    model.say, model.plans = (lambda chunks: 0.01 * sum(n for n, _ in chunks)), object()
    now[0] += 2
    assert times.seconds(answering(1)) == pytest.approx(0.01)  # a better plan is believed


def test_other_plans_are_asked_at_once_but_not_all_the_time(now: list[float]) -> None:
    model = Said(lambda chunks: 0.01)
    times = StepTimes(model)
    for plans in range(100):
        model.plans = plans
        now[0] += 0.1
        times.seconds(answering(1))
    assert model.asked == pytest.approx(10, abs=1)
    now[0] += 10
    model.say = lambda chunks: 0.5
    model.plans = "others"
    assert times.seconds(answering(1)) == 0.5


def test_models_are_asked_what_is_in_a_step() -> None:
    asked: list[Sequence[tuple[int, float]]] = []

    def say(chunks: Sequence[tuple[int, float]]) -> float:
        asked.append(chunks)
        return 1.0

    times = StepTimes(Said(say))
    for shape in (
        answering(2, 10),
        StepShape(2, 5, 0, 3, 10),
        StepShape(3, 402, 401, 0, 300),
        StepShape(1, 7, 7, 0, 3),
    ):
        times.seconds(shape)
    assert asked == [
        [(1, 10.0), (1, 10.0)],
        [(4, 10.0), (1, 10.0)],
        [(1, 300.0), (200, 200.0), (201, 200.0)],
        [(7, 0.0)],
    ]
    assert shape_of_chunks([(1, 10.0), (1, 10.0)]) == answering(2, 10)
    assert shape_of_chunks([(7, 0.0)]) == StepShape(1, 7, 7, 0, 3)


# --- what requests ask


@given(st.floats(0, 5000), st.floats(0, 5000), shapes)
def test_more_to_read_never_takes_less(a: float, b: float, seen: list[tuple[StepShape, float]]) -> None:
    times = predicted()
    for shape, seconds in seen:
        times.observe(shape, seconds)
    found = [times.reading(tokens) for tokens in (0.0, *sorted((a, b)))]
    assert found[0] == 0
    assert all(x is not None and y is not None and x <= y * (1 + 1e-9) for x, y in pairwise(found))


def test_reading_is_predicted_at_a_few_sizes() -> None:
    model = Said(lambda chunks: 0.01 + 0.001 * sum(n for n, _ in chunks))
    times = StepTimes(model)
    for tokens in range(1, 3000):
        expected = 0.01 + 0.001 * tokens
        assert times.reading(tokens) == pytest.approx(expected, rel=0.15, abs=0.011)
    assert model.asked == len(READ)


def test_drafts_make_tokens_cheaper_as_long_as_they_are_right() -> None:
    times, drafted, plain = predicted(), StepShape(2, 8, 0, 6), seconds_of(answering(2))
    assert times.a_token(2) == pytest.approx(plain)
    for _ in range(60):
        times.observe(drafted, 1.5 * plain)
        times.gave(drafted, 1.5 * plain, 6)  # three times as many
    assert times.a_token(2) == pytest.approx(plain / 2, rel=0.02)
    assert times.seconds(answering(2)) == pytest.approx(plain)
    for _ in range(60):
        times.observe(answering(2), plain)
    assert times.a_token(2) == pytest.approx(plain, rel=0.02)
