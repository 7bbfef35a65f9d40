"""The choice of cores for a number of threads: which is measured, what is kept, what is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from hetrun.backends import reference
from hetrun.executor.autotune.measurement import core_choice as module
from hetrun.executor.autotune.measurement.core_choice import heaviest, recall_seats, take_seats
from hetrun.executor.autotune.measurement.prober import Prober
from hetrun.executor.autotune.setup import Setup, planner_for
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.online import OnlinePlanner
from hetrun.planner.trials import Trial, trials_of
from hetrun.system.core_sets import CoreSet
from hetrun.system.cpu_topology import TopoTree, read_topology
from hetrun.system.thread_affinity import ThreadCores
from tests.models.tiny import TinyLlama
from tests.support.rig import graph_of
from tests.support.sysfs import EPYC, of

SPREAD = "1 core of each cache"


class Clock:
    """Measures as a machine would on which some sets of cores take so long; any other takes a second."""

    def __init__(self, seats: ThreadCores, seconds: dict[str, float]) -> None:
        self._seats, self._seconds = seats, seconds
        self.asked: list[tuple[str, Trial]] = []

    def measure(self, trial: Trial, hear: Callable[[float], None]) -> None:
        cores = self._seats.of(trial.threads)
        self.asked.append((cores.name, trial))
        hear(self._seconds.get(cores.name, 1.0))


@pytest.fixture(scope="module")
def tree() -> TopoTree:
    return read_topology(of(EPYC))


@pytest.fixture
def seats(tree: TopoTree, monkeypatch: pytest.MonkeyPatch) -> ThreadCores:
    made = ThreadCores(tree)
    monkeypatch.setattr(module, "chosen", lambda: made)
    return made


@pytest.fixture(scope="module")
def planner() -> OnlinePlanner:
    model = TinyLlama("tiny", layers=2, embd=64, ffn=128, heads=2, kv_heads=2, context=64)
    return planner_for(
        graph_of(model), {"reference": reference.create()}, WorkTimes(), setup_for((1, 16, 48))
    )


def setup_for(threads: tuple[int, ...]) -> Setup:
    return Setup({"": "reference"}, ("reference",), threads, 1 << 40, 64, False, None, wide=threads[-1:])


def take(planner: OnlinePlanner, clock: Clock, forecast: WorkTimes) -> None:
    take_seats(cast(Prober, clock), planner, forecast, setup_for((1, 16, 48, 96)))


def test_the_fastest_set_is_taken_and_remembered(
    planner: OnlinePlanner, seats: ThreadCores, tree: TopoTree
) -> None:
    clock, forecast = Clock(seats, {SPREAD: 0.5, "2 cores of each cache of one socket": 0.7}), WorkTimes()
    take(planner, clock, forecast)
    assert seats.of(16).name == SPREAD
    # Where each core has a thread nothing was to choose; of the others each set was asked once.
    assert {trial.threads for _, trial in clock.asked if trial.threads in (1, 96)} == set()
    names = [name for name, trial in clock.asked if trial.threads == 16]
    assert sorted(names) == sorted({s.name for s in seats.open(16)})
    assert all(trial.tokens == 1 for _, trial in clock.asked)
    asked = len(clock.asked)
    take(planner, clock, forecast)
    assert len(clock.asked) == asked


def test_what_was_measured_before_is_recalled(
    planner: OnlinePlanner,
    seats: ThreadCores,
    tree: TopoTree,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forecast = WorkTimes()
    take(planner, Clock(seats, {SPREAD: 0.5}), forecast)
    forecast.save(tmp_path / "times.json")
    later = ThreadCores(tree)
    monkeypatch.setattr(module, "chosen", lambda: later)
    recall_seats(WorkTimes.load(tmp_path / "times.json"), setup_for((1, 16, 48)))
    assert later.of(16).name == SPREAD


def test_the_system_keeps_the_choice_unless_a_set_is_clearly_better(
    planner: OnlinePlanner, seats: ThreadCores
) -> None:
    take(planner, Clock(seats, {SPREAD: 0.99}), WorkTimes())
    assert seats.of(16).name == "anywhere"


def test_half_of_a_measurement_decides_nothing(planner: OnlinePlanner, seats: ThreadCores) -> None:
    forecast = WorkTimes()
    forecast.learn_fact(f"seats 16 {SPREAD}", "reference", 0.1)
    recall_seats(forecast, setup_for((16,)))
    assert seats.of(16) == CoreSet("anywhere", tuple(range(96)), 16)


def test_the_heaviest_units_are_those_with_most_weights(planner: OnlinePlanner) -> None:
    units = heaviest(planner.units, planner.nbytes, "reference")
    of_form = sum(size for (i, _), size in planner.nbytes.items() if planner.units[i] in units)
    for other in planner.units:
        total = sum(s for (i, _), s in planner.nbytes.items() if planner.units[i].form == other.form)
        assert total <= of_form


def test_large_passes_are_measured_with_all_numbers_that_keep_cores_busy(planner: OnlinePlanner) -> None:
    trials = trials_of(planner._graph, planner.units, "reference", True, (1, 48, 96), 1024, 512, (48, 96))
    large = {trial.threads for trial in trials if trial.tokens > 16}
    assert large == {48, 96}
    assert {trial.threads for trial in trials if trial.tokens == 1} == {1, 48, 96}
