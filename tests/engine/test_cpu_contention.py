"""Another program takes a core while a model answers: it goes on with fewer threads, and gets them back.

What others take, and how long passes are meanwhile, is made up; test_core_contention.py burns real cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hetrun.api.local_model import LocalModel
from hetrun.backend import Segment
from hetrun.engine.loaded_model import LoadedModel
from hetrun.executor.autotune.autotuner import Autotuner
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.planner.options import PlannerMachine
from tests.engine import simulated
from tests.engine.simulated import Clock
from tests.models import tiny

CORES = 2
TOKENS = 64
BARRIERS = 20.0  # times as long: a pass of which one thread has lost its core

pytestmark = pytest.mark.usefixtures("all_threads")


@dataclass
class Crowd:
    """What other programs take of the cores, as the system would tell it."""

    taken: float = 0.0
    count: int = CORES
    before: float | None = None  # what they took on average since the last look, if it was something else

    def look(self, at: float) -> float:
        before, self.before = self.before, None
        return self.taken if before is None else before


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    with simulated.simulated(monkeypatch) as clock:
        yield clock


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Crowd:
    """On a machine of two cores, one of which another program may take."""
    crowd = Crowd()

    def speed(at: float, name: str, segment: Segment) -> float:
        alone = CORES / clock.threads
        return BARRIERS * alone if clock.threads + crowd.taken > CORES else alone

    clock.speed = speed
    monkeypatch.setattr("hetrun.executor.autotune.autotuner.OtherPrograms", lambda: crowd)
    for module in ("loading.placement_planner", "tuning_setup"):
        monkeypatch.setattr(
            f"hetrun.executor.{module}.this_machine", lambda: PlannerMachine(CORES, (1, CORES), (CORES,))
        )
    return crowd


def planned(loaded: LoadedModel) -> tuple[PlannedModel, Autotuner]:
    assert isinstance(loaded.model, PlannedModel)
    assert loaded.model.autotuner is not None
    return loaded.model, loaded.model.autotuner


def step(loaded: LoadedModel) -> None:
    """Of enough tokens for all threads to pay."""
    model = loaded.model
    seq = model.alloc()
    model.step(Step((Chunk(seq, np.arange(TOKENS), np.array([TOKENS - 1])),)))
    model.free(seq)
    model.tend()


def threads(model: PlannedModel) -> set[int]:
    """Of passes like these, now."""
    return {model.plans.plan(TOKENS).threads}


def kept(autotuner: Autotuner) -> list[str]:
    """Why plans are in force."""
    return [c.reason for c in autotuner.changes if c.became == "in force"]


def passes_of(loaded: LoadedModel, clock: Clock, seconds: float) -> list[int]:
    """Steps for so long: with how many threads each ran."""
    found, end = [], clock.now + seconds
    while clock.now < end:
        found.append(loaded.model.plans.plan(TOKENS).threads)
        step(loaded)
    return found


def fly(loaded: LoadedModel, clock: Clock, seconds: float, what: Callable[[], bool] = lambda: False) -> bool:
    """Steps until it is so, or for so long; whether it is so."""
    end = clock.now + seconds
    while not what() and clock.now < end:
        step(loaded)
    return what()


def test_threads_follow_what_others_take(
    tmp_path: Path, crowd: Crowd, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hetrun.executor.autotune")

    def watch(loaded: LoadedModel) -> None:
        model, autotuner = planned(loaded)
        fly(loaded, clock, 5)
        assert threads(model) == {CORES}
        works = set(autotuner.forecast.works())
        crowd.taken = 1.0
        assert fly(loaded, clock, 3, lambda: threads(model) == {1}), "within a few passes"
        fly(loaded, clock, 2)
        slow = passes_of(loaded, clock, 10)
        assert slow.count(CORES) <= 0.1 * len(slow), "the others are tried seldom"
        assert set(autotuner.forecast.works()) == works, "nothing is learnt from a crowd"
        crowd.taken = 0.0
        assert fly(loaded, clock, 5, lambda: "cores are free again" in kept(autotuner)[-1])
        assert threads(model) == {CORES}
        why = kept(autotuner)
        assert any("another program takes a core" in w and f"instead of {CORES}" in w for w in why)
        assert all(c.reason in caplog.text for c in autotuner.changes)

    path = tiny.write_gguf(simulated.MODEL, tmp_path / "crowded.gguf")
    with LocalModel(path, backends=["one"], ctx=256, planner="measured", eager=True) as llm:
        llm.call(watch)


def test_what_others_did_while_nothing_ran_says_nothing_about_now(
    tmp_path: Path, crowd: Crowd, clock: Clock
) -> None:
    def watch(loaded: LoadedModel) -> None:
        model, autotuner = planned(loaded)
        fly(loaded, clock, 5)
        changes = len(autotuner.changes)
        clock.now += 60
        crowd.before = 1.0
        model.expect(TOKENS)
        assert autotuner._crowd.quiet
        assert set(passes_of(loaded, clock, 2)) == {CORES}
        assert len(autotuner.changes) == changes
        # Those that are still there are seen soon.
        clock.now += 60
        crowd.taken = 1.0
        model.expect(TOKENS)
        assert fly(loaded, clock, 3, lambda: threads(model) == {1})

    path = tiny.write_gguf(simulated.MODEL, tmp_path / "rested.gguf")
    with LocalModel(path, backends=["one"], ctx=256, planner="measured", eager=True) as llm:
        llm.call(watch)


def test_threads_that_the_user_named_stay(tmp_path: Path, crowd: Crowd, clock: Clock) -> None:
    def watch(loaded: LoadedModel) -> None:
        crowd.taken = 1.0
        fly(loaded, clock, 20)
        assert {p.threads for p in loaded.model.plans.plans.values()} == {CORES}

    path = tiny.write_gguf(simulated.MODEL, tmp_path / "named.gguf")
    with LocalModel(path, backends=["one"], threads=CORES, ctx=256, planner="measured") as llm:
        llm.call(watch)
