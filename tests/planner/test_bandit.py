"""The bandit that decides which plan passes run by, on passes that are made up."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import exp, log

import pytest
from hypothesis import given, strategies as st

from hetrun.planner.bandit import CERTAIN, MOST_ARMS, SHARE, WINDOW_S, Race, TrialBudget, Verdict
from hetrun.planner.plan import Plan, segment_of

YARD = 0.05  # seconds of a pass by the yardstick


def plan(threads: int = 1, backend: str = "one") -> Plan:
    return Plan("1", threads, (), ((segment_of("all", backend, (), frozenset(), "a test"),),))


class Passes:
    """A bucket whose plans take what a test says, on a clock that runs on by what they take."""

    def __init__(self, seconds: Callable[[str, float], float], priors: dict[str, float]) -> None:
        """`seconds`: of a pass by a plan, at a moment; the first of the `priors` is in force."""
        self.verdicts: list[Verdict] = []
        self.race = Race("1", TrialBudget(), self.verdicts.append, "old")
        self.seconds, self.now = seconds, 0.0
        self.ran: list[str] = []
        for name, prior in priors.items():
            self.race.offer(name, plan(backend=name), prior, CERTAIN)
            if not self.ran and self.race.force is None:
                self.race.put_in_force(name)

    def run(self, passes: int) -> list[str]:
        """Run this many passes; the plans that they ran by."""
        before = len(self.ran)
        for _ in range(passes):
            name = str(self.race.running)
            took = self.seconds(name, self.now)
            self.now += took
            self.race.observe(took, YARD, False, self.now)
            self.race.choose(self.now)
            self.ran.append(name)
        return self.ran[before:]


def test_what_is_better_is_in_force_after_a_few_passes() -> None:
    passes = Passes(lambda name, at: YARD * (0.6 if name == "new" else 1.0), {"old": 0.0, "new": log(0.6)})
    passes.run(6)
    assert passes.race.force == "new"
    (verdict,) = passes.verdicts
    assert verdict.kept
    assert verdict.ratio == pytest.approx(0.6, rel=0.1)
    assert verdict.expected == pytest.approx(0.6, rel=1e-6)


@given(st.integers(0, 10_000), st.floats(1.15, 20.0), st.floats(0.2, 0.95))
def test_a_change_that_was_wrong_is_back_within_three_passes(seed: int, truth: float, said: float) -> None:
    chance = random.Random(seed)

    def seconds(name: str, at: float) -> float:
        return YARD * (truth if name == "new" else 1.0) * (1 + chance.expovariate(1 / 0.03))

    passes = Passes(seconds, {"old": 0.0, "new": log(said)})
    ran = passes.run(60)
    assert passes.race.force == "old"
    assert "new new new new" not in " ".join(ran)
    assert ran[:20].count("new") <= 4
    lost = sum(YARD * (truth - 1) for name in ran if name == "new")
    first = YARD * (truth - 1)  # what could not be known
    assert lost <= 3 * first + SHARE * WINDOW_S


def test_what_is_as_good_takes_no_turns() -> None:
    chance = random.Random(3)
    passes = Passes(
        lambda name, at: YARD * (1 + chance.expovariate(1 / 0.05)), {"old": 0.0, "new": 0.0, "other": 0.01}
    )
    passes.run(2000)
    assert sum(v.kept for v in passes.verdicts) <= 2


@pytest.mark.parametrize("slower", [1.5, 5.0, 30.0])
def test_a_machine_that_becomes_slow_is_no_reason_to_leave_a_plan(slower: float) -> None:
    def seconds(name: str, at: float) -> float:
        return YARD * (1.0 if name == "good" else 1.4) * (slower if at > 3 else 1.0)

    passes = Passes(seconds, {"good": 0.0, "bad": log(1.4)})
    ran = passes.run(400)
    assert passes.race.force == "good"
    assert ran.count("bad") < 0.1 * len(ran)


def test_a_plan_that_becomes_slow_is_left() -> None:
    def seconds(name: str, at: float) -> float:
        return YARD * (5.0 if name == "old" and at > 3 else 1.0 if name == "old" else 1.3)

    passes = Passes(seconds, {"old": 0.0, "new": log(1.3)})
    passes.run(50)
    assert set(passes.ran) == {"old"}
    while passes.now < 3:
        passes.run(1)
    ran = passes.run(60)
    assert passes.race.force == "new"
    assert ran.count("old") < 30


def test_a_burst_that_ends_while_another_plan_is_tried_is_no_reason_to_stay_with_it() -> None:
    def seconds(name: str, at: float) -> float:
        return YARD * (1.0 if name == "good" else 2.4) * (5.0 if 3 < at < 3.6 else 1.0)

    passes = Passes(seconds, {"good": 0.0, "bad": log(2.4)})
    ran = passes.run(300)
    assert passes.race.force == "good"
    assert not any(v.kept for v in passes.verdicts)
    assert ran.count("bad") <= 6


def test_what_was_unlucky_has_another_chance() -> None:
    """All that the good plan has shown was slow; a minute later predictions count again."""
    passes = Passes(lambda name, at: YARD * (0.6 if name == "good" else 1.0), {"old": 0.0, "good": log(0.6)})
    passes.run(6)
    race = passes.race
    assert race.force == "good"
    race.arms["good"].mean, race.arms["good"].at = log(4.0), passes.now
    race.replace_standing("old", log(0.25))
    race.arms["good"].bias = log(4.0) - log(0.6)
    assert "good" not in passes.run(20)
    while passes.now < 120:
        passes.run(1)
    assert race.force == "good"


@pytest.mark.parametrize("crowded", [False, True])
def test_a_backend_that_is_far_slower_than_predicted_is_left_at_once(crowded: bool) -> None:
    """Unless other programs take cores, which makes all of them slow."""
    passes = Passes(lambda name, at: YARD * (3.6 if name == "old" else 1.8), {"old": 0.0, "new": log(1.8)})
    passes.race.crowded = crowded
    ran = passes.run(10)
    assert ran[:3].count("old") == (3 if crowded else 1)
    if not crowded:
        assert passes.race.force == "new"


def test_the_fixed_order_stays_and_plans_that_go_are_remembered() -> None:
    passes = Passes(lambda name, at: YARD, {"old": 0.0, **{f"new{i}": 0.5 + i / 10 for i in range(20)}})
    race = passes.race
    assert "old" in race.arms
    assert len(race.arms) <= MOST_ARMS
    assert all(race.knows(f"new{i}") for i in range(20))
    gone = next(iter(race.gone.values()))
    gone.failed, gone.bias, gone.at = 3, 0.4, passes.now
    again = race.offer(gone.key, plan(), 0.3, CERTAIN)
    assert again.failed == 3
    assert again.mean == pytest.approx(0.7)


def test_one_disturbed_pass_changes_nothing() -> None:
    count = 0

    def seconds(name: str, at: float) -> float:
        nonlocal count
        count += 1
        return YARD * (20.0 if count == 30 else 1.0)

    passes = Passes(seconds, {"good": 0.0, "bad": log(2.0)})
    passes.run(40)
    assert exp(passes.race.standing.mean) == pytest.approx(1.0, rel=0.15)
    assert passes.race.force == "good"


def test_trying_costs_a_share_of_any_minute_at_most() -> None:
    passes = Passes(
        lambda name, at: YARD * {"good": 1.0, "bad": 1.3, "worse": 4.0, "worst": 12.0}[name],
        {"good": 0.0, "bad": 0.0, "worse": -0.1, "worst": 0.05},
    )
    lost: list[tuple[float, float]] = []
    while passes.now < 600:
        (name,) = passes.run(1)
        took = passes.seconds(name, passes.now)
        lost.append((passes.now, took - YARD))
    for begun in range(60, 540, 10):  # what could not be known was lost in the first minute
        assert sum(s for at, s in lost if begun <= at < begun + WINDOW_S) <= SHARE * WINDOW_S


def test_copies_that_went_take_their_plans_with_them() -> None:
    passes = Passes(lambda name, at: YARD * (0.5 if name == "new" else 1.0), {"old": 0.0, "new": log(0.5)})
    passes.run(8)
    assert passes.race.force == "new"
    gone = passes.race.arms["new"].plan
    passes.race.remove(lambda p: p is gone)
    assert passes.race.force == passes.race.running == "old"


def test_fewer_threads_are_tried_when_others_want_the_cores() -> None:
    race = Race("1", TrialBudget(), lambda verdict: None)
    race.offer("two", plan(2), 0.0, CERTAIN)
    race.put_in_force("two")
    race.offer("one", plan(1), log(1.9), CERTAIN)
    at, crowd, ran = 0.0, False, []
    for number in range(60):
        if number == 30:
            race.crowd()
            crowd = True
        name = str(race.running)
        ran.append(name)
        took = YARD * ((2.4 if name == "one" else 9.0) if crowd else (1.9 if name == "one" else 1.0))
        at += took
        race.observe(took, YARD, False, at)
        race.choose(at)
    assert "one" not in ran[:30]
    assert ran[30:].count("two") <= 3
    assert race.force == "one"
