"""When a plan is looked at again, and how soon."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrun.executor.autotune.drift import LONGEST_REST_S, SHORTEST_REST_S, Watcher
from hetrun.planner.costmodel import OpWork, WorkTimes
from hetrun.planner.plan import PlanSet
from tests.planner.test_online_planner import UNITS, forecast, large, now, planner, small, static


@pytest.fixture
def times() -> WorkTimes:
    return forecast(cpu=small, other=large)


@pytest.fixture
def watcher(times: WorkTimes) -> Watcher:
    watcher = Watcher(planner(times, "cpu", "other"), times)
    watcher.watch(static(), now(), ("cpu", "other"))
    return watcher


def again(times: WorkTimes, backend: str, factor: float) -> None:
    """One unit takes another time than it did, at every size."""
    times.rescale(OpWork(UNITS[1].form, backend, 2), factor)


def test_nothing_has_drifted_at_first(watcher: Watcher) -> None:
    assert not watcher.drifted()


@pytest.mark.parametrize(
    ("backend", "factor", "matters"),
    [
        ("cpu", 1.3, True),
        ("cpu", 0.7, False),
        ("other", 0.2, True),
        ("other", 1.5, False),
        ("cpu", 1.05, False),
    ],
)
def test_what_is_used_matters_when_it_is_slower_and_what_is_not_when_it_is_faster(
    watcher: Watcher, times: WorkTimes, backend: str, factor: float, matters: bool
) -> None:
    again(times, backend, factor)
    drifted = watcher.drifted()
    assert bool(drifted) == matters
    assert not matters or f"on {backend} takes" in drifted


def test_longer_sequences_are_noticed_when_there_are_many(watcher: Watcher) -> None:
    seen = replace(now(), depth={"1": 4000.0}, passes={"1": 20.0})
    assert "tokens see 4000 others" in watcher.moved(seen)
    assert not watcher.moved(replace(seen, passes={"1": 2.0}))
    assert not watcher.moved(replace(seen, depth={"1": 600.0}))


def test_plans_that_take_turns_rest_longer_and_longer(watcher: Watcher) -> None:
    def threads(n: int) -> PlanSet:
        plans = static()
        return replace(plans, plans={b: replace(p, threads=n) for b, p in plans.plans.items()})

    rests = []
    for i in range(20):
        watcher.changed(threads(1 + i % 2), 100.0)
        rests.append(watcher.ready_at - 100.0)
    assert rests[0] == SHORTEST_REST_S
    assert rests == sorted(rests)
    assert rests[-1] == LONGEST_REST_S
    watcher.changed(threads(5), 100.0)
    assert watcher.ready_at - 100.0 < LONGEST_REST_S


def test_one_bucket_that_takes_turns_is_enough_to_rest_longer(watcher: Watcher) -> None:
    plans, rests = static(), []
    for i in range(20):
        some = {
            "1": replace(plans.plans["1"], threads=1 + i % 2),
            "257-512": replace(plans.plans["257-512"], threads=i),
        }
        watcher.changed(replace(plans, plans={**plans.plans, **some}), 100.0)
        rests.append(watcher.ready_at - 100.0)
    assert rests == sorted(rests)
    assert rests[-1] == LONGEST_REST_S


def test_planning_makes_the_next_one_wait(watcher: Watcher) -> None:
    watcher.rest(100.0, 3.0)
    assert watcher.ready_at == 103.0
    watcher.rest(100.0, 1.0)
    assert watcher.ready_at == 103.0
