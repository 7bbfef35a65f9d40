"""What is expected of figures that are measured again and again, beside machines that others use too."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given, strategies as st

from hetrun.prefetch.pass_times import FEW
from hetrun.prefetch.streamed_weights import Compute
from hetrun.system.estimate import Estimate, TrackedEstimate

FEW_STEPS = 5  # after a shift
Noise = Callable[[int, random.Random], float]


def idle(i: int, chance: random.Random) -> float:
    return chance.lognormvariate(0, 0.03)


def busy(i: int, chance: random.Random) -> float:
    """One in five is interrupted, some of them for long."""
    return chance.lognormvariate(0, 0.05) * (chance.paretovariate(1.2) if chance.random() < 0.2 else 1)


def torn(i: int, chance: random.Random) -> float:
    """One in three takes five times as long."""
    return idle(i, chance) * (5 if chance.random() < 0.3 else 1)


def moved(noise: Noise, period: int) -> Noise:
    """Five times as slow every other while."""
    return lambda i, chance: noise(i, chance) * (5 if i // period % 2 else 1)


def told(noise: Noise, n: int, seed: int) -> list[tuple[Estimate, float]]:
    """What was expected of each of n measurements, and what it was."""
    chance, tracked, found = random.Random(seed), TrackedEstimate(1.0), []
    for i in range(n):
        value, expected = noise(i, chance), tracked.estimate
        assert expected is not None
        found.append((expected, value))
        tracked.observe(value)
    return found


def covered(found: Sequence[tuple[Estimate, float]], period: int) -> float:
    """The part that came as expected, but for the first few after a shift."""
    counted = [pair for i, pair in enumerate(found) if i < period or i % period >= FEW_STEPS]
    return sum(e.least <= value <= e.most for e, value in counted) / len(counted)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("period", [100, 1000])
@pytest.mark.parametrize("noise", [idle, busy, torn])
def test_nine_in_ten_come_as_expected(noise: Noise, period: int, seed: int) -> None:
    assert covered(told(noise, 1000, seed), 10**9) >= 0.9
    found = told(moved(noise, period), 1000, seed)
    assert covered(found, period) >= 0.9


@given(st.integers(0, 10**6), st.floats(0.003, 0.5), st.floats(1.0, 3.0))
def test_nine_in_ten_come_as_expected_whatever_the_noise(seed: int, sigma: float, tail: float) -> None:
    def noise(i: int, chance: random.Random) -> float:
        return chance.lognormvariate(0, sigma) * (chance.paretovariate(tail) if chance.random() < 0.1 else 1)

    assert covered(told(noise, 600, seed), 10**9) >= 0.9


def lognormal(sigma: float, i: int, chance: random.Random) -> float:
    return chance.lognormvariate(0, sigma)


def test_the_width_is_that_of_the_noise() -> None:
    for sigma in (0.01, 0.03, 0.1):
        found = told(partial(lognormal, sigma), 1000, 1)
        widths = [e.spread for e, _ in found[200:]]
        assert sigma < sum(widths) / len(widths) < 1.6 * sigma


@pytest.mark.parametrize("noise", [idle, busy])
@pytest.mark.parametrize("seed", range(5))
def test_a_shift_is_followed_within_a_few_and_back(noise: Noise, seed: int) -> None:
    found = [e.seconds for e, _ in told(moved(noise, 200), 1000, seed)]
    for at, level in ((200, 5), (400, 1), (600, 5), (800, 1)):
        assert median(found[at + FEW_STEPS : at + 4 * FEW_STEPS]) == pytest.approx(level, rel=0.35)
    if noise is idle:
        assert found[202] == pytest.approx(5, rel=0.1)
        assert found[402] == pytest.approx(1, rel=0.1)


@given(st.integers(0, 10**6), st.floats(5, 1000))
def test_one_alone_moves_nothing(seed: int, slow: float) -> None:
    chance, tracked = random.Random(seed), TrackedEstimate()
    for _ in range(100):
        tracked.observe(chance.lognormvariate(0, 0.03))
    before = tracked.value
    tracked.observe(slow)
    assert tracked.value == pytest.approx(before, rel=0.03)
    tracked.observe(chance.lognormvariate(0, 0.03))
    assert tracked.value == pytest.approx(before, rel=0.05)


def test_a_guess_counts_until_two_agree_and_without_one_the_first_does() -> None:
    tracked = TrackedEstimate(1.0)
    tracked.observe(7.0)
    assert tracked.value == 1
    tracked.observe(8.0)
    assert tracked.value == pytest.approx(7)
    tracked = TrackedEstimate()
    assert (tracked.value, tracked.estimate) == (0, None)
    tracked.observe(7.0)
    assert tracked.value == 7


def test_what_may_be_another_thing_is_learned_as_if_it_were_new() -> None:
    old, new = TrackedEstimate(), TrackedEstimate()
    for tracked in (old, new):
        for _ in range(50):
            tracked.observe(1.0)
    new.reopen()
    for tracked in (old, new):
        for _ in range(2):
            tracked.observe(1.01)
    assert old.value < new.value == pytest.approx(1.01)
    new.scale(3)
    assert new.value == pytest.approx(3.03)


@given(st.lists(st.floats(0, 1e300), min_size=1))
def test_there_is_always_an_estimate(values: list[float]) -> None:
    tracked = TrackedEstimate()
    for value in values:
        tracked.observe(value)
        found = tracked.estimate
        assert found is not None
        assert 0 <= found.least <= found.seconds <= found.most
        assert found.spread >= 0


def test_passes_whose_weights_come_from_disk() -> None:
    compute = Compute()
    assert compute.predict(1, 0, 1e9) is None
    for _ in range(5):
        compute.observe(1, 0.1)
        compute.observe(100, 0.3)
    assert compute.predict(1, 0, 1e9) == compute.predict(FEW, 0, 1e9) == pytest.approx(0.1)
    assert compute.predict(200, 0, 1e9) == pytest.approx(0.5)
    assert compute.predict(200, 2e9, 1e9) == 2.0
    compute.observe(1, 5.0)
    assert compute.predict(1, 0, 1e9) == pytest.approx(0.1)
    for seconds in (0.01, 0.01):  # less than the weights alone took
        compute.observe(100, seconds)
    times = [compute.predict(n, 0, 1e9) or 0.0 for n in range(1, 300)]
    assert all(a <= b for a, b in pairwise(times))
