"""The autotuner on a clock of the test's own: what it decides over minutes, whatever else this machine does.

Two backends compute nothing and let the clock run on by what a test says that they take. Nothing waits, so
minutes pass in a second; tests/engine/test_autotuner.py has backends that really are slow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hetrun.api.local_model import LocalModel, make_plan
from hetrun.backend import Segment
from hetrun.config import Settings, dirs
from hetrun.engine.loaded_model import LoadedModel
from hetrun.errors import BudgetError, Cancelled
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.planner.costmodel.store import read
from hetrun.planner.plan import PlanSet
from hetrun.planner.switch_cost import turn
from tests.engine.simulated import MODEL, NAMES, Clock, Simulated, Speed, on, simulated
from tests.models import tiny
from tests.support.tiers import exhaustive

SHORT = 0.2  # of what work takes: where a trial must cost little to come soon

PROBE = "hetrun.executor.autotune.measurement.backend_probe"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    with simulated(monkeypatch) as clock:
        yield clock


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(MODEL, tmp_path_factory.mktemp("models") / "piloted.gguf")


@dataclass(frozen=True)
class Flight:
    """What happened."""

    changes: list[tuple[float, str]]  # when, and why
    kept: list[tuple[float, str]]  # of these, those of plans that took the place of others
    plans: PlanSet
    turn_s: float | None  # what it costs that the two take turns

    def users(self, scope: str) -> set[str]:
        """Who runs a scope in passes of one token."""
        return {s.backend for s in self.plans.plan(1).segments for op in s.ops if scope in op.scope}


def fly(model: Path, clock: Clock, seconds: float, speed: Speed) -> Flight:
    """Tokens one by one for so long."""

    def steps(loaded: LoadedModel) -> Flight:
        model = loaded.model
        assert isinstance(model, PlannedModel)
        assert model.autotuner is not None
        seq = model.alloc()
        clock.began = clock.now
        while clock.now < clock.began + seconds:
            if model.length(seq) == model.context:
                model.truncate(seq, 0)
            model.step(Step((Chunk(seq, np.array([5]), np.array([0])),)))
            model.tend(idle=True)
        changes = [c for c in model.autotuner.changes if c.at > clock.began]
        told = [(c.at - clock.began, c.reason) for c in changes]
        kept = [(c.at - clock.began, c.reason) for c in changes if c.became == "in force"]
        return Flight(told, kept, model.plans, model.autotuner.forecast.fact(turn(1), "two"))

    clock.speed = speed
    clock.began = 1e9
    with LocalModel(model, backends=NAMES, ctx=512, threads=1, planner="measured", eager=True) as llm:
        return llm.call(steps)


def test_what_becomes_fast_is_used_within_five_seconds(
    model: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hetrun.executor.autotune")

    def speed(at: float, name: str, segment: Segment) -> float:
        slow = name == "one" and any(".ffn" in op.scope for op in segment.ops)
        return SHORT * (10.0 if slow and at < 10 else 1.0 if name == "one" else 2.0)

    before = fly(model, clock, 9, speed)
    assert before.users("ffn") == {"two"}
    assert before.users("attn") == {"one"}
    assert before.turn_s == 0, "measured: on this clock it costs nothing"
    after = fly(model, clock, 15, speed)
    assert after.users("ffn") == {"one"}
    assert any("now run on one" in why and "less time than before" in why for _, why in after.kept)
    assert all(why in caplog.text for _, why in after.changes)


def test_what_becomes_slow_is_left(model: Path, clock: Clock) -> None:
    def speed(at: float, name: str, segment: Segment) -> float:
        return (10.0 if at > 20 else 1.0) if name == "one" else 2.0

    assert fly(model, clock, 19, speed).users("") == {"one"}
    after = fly(model, clock, 25, speed)
    assert after.users("") == {"two"}
    assert "two instead of one" in after.kept[0][1]
    assert after.kept[0][0] < 25, "and soon"


def test_what_fails_when_it_is_tried_is_left_at_once(
    model: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no more")

    def work(loaded: LoadedModel) -> None:
        model = loaded.model
        assert isinstance(model, PlannedModel)
        assert model.autotuner is not None
        assert model.plans.backends == ["two"]
        monkeypatch.setattr(type(model.autotuner._explorer), "trying", "two")
        monkeypatch.setattr(model.autotuner._explorer, "step", fail)
        clock.now += 1
        model.tend()
        assert model.plans.backends == ["one"]
        assert all("inf" not in change.reason for change in model.autotuner.changes)

    clock.speed = lambda at, name, segment: 1.0 if name == "two" else 2.0
    with LocalModel(model, backends=NAMES, ctx=512, threads=1, planner="measured", eager=True) as llm:
        llm.call(work)
    assert "two is left out: no more" in caplog.text


def test_only_what_failed_in_this_step_is_left(
    model: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device in whose segment the step before was cancelled is not to blame now."""

    def cancelled(at: float, name: str, segment: Segment) -> float:
        raise Cancelled("someone wants no more")

    def no_room(seq: int, n: int) -> object:
        raise BudgetError("keys and values: no room")

    def work(loaded: LoadedModel) -> None:
        model = loaded.model
        assert isinstance(model, PlannedModel)
        only_one = Step((Chunk(model.alloc(), np.array([5], np.int32), np.array([0])),))
        clock.speed = cancelled
        with pytest.raises(Cancelled):
            model.step(only_one)
        monkeypatch.setattr(model.kv, "extend", no_room)
        with pytest.raises(BudgetError):
            model.step(only_one)
        assert model.plans.backends == ["two"]

    clock.speed = lambda at, name, segment: 1.0 if name == "two" else 2.0
    with LocalModel(model, backends=NAMES, ctx=512, threads=1, planner="measured", eager=True) as llm:
        llm.call(work)


@pytest.mark.parametrize(
    ("cores", "others", "rough"), [(2, 0.4, False), (2, 0.6, False), (1, 0.6, True), (16, 9.0, False)]
)
def test_others_on_cores_that_are_not_used_here_do_not_disturb(
    cores: int, others: float, rough: bool, model: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{PROBE}.cpu_count", lambda: cores)
    monkeypatch.setattr(f"{PROBE}.others_running", lambda: others)
    with LocalModel(model, backends=NAMES, ctx=512, threads=1, planner="measured", eager=True):
        pass
    (kept,) = (dirs().cache / "times").glob("*.json")
    works, _ = read(kept)
    assert any(cell.rough for cells in works.values() for cell in cells.values()) == rough


def test_what_was_measured_in_a_crowd_is_measured_again_without_it(
    model: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [1.0]
    monkeypatch.setattr("hetrun.executor.autotune.measurement.crowded_measurement.PROBE_BUSY_S", 1e4)
    monkeypatch.setattr(f"{PROBE}.cpu_count", lambda: 1)
    monkeypatch.setattr(f"{PROBE}.others_running", lambda: others[0])

    def answer(loaded: LoadedModel) -> None:
        model = loaded.model
        seq = model.alloc()
        for _ in range(8):
            model.step(Step((Chunk(seq, np.array([5]), np.array([0])),)))
            model.tend()
        model.free(seq)

    def users(loaded: LoadedModel, scope: str = "") -> set[str]:
        segments = loaded.model.plans.plan(1).segments
        return {s.backend for s in segments for op in s.ops if op.scope.startswith(scope)}

    def look(loaded: LoadedModel) -> None:
        assert users(loaded) == {"one"}, "what was measured beside others has to prove itself"
        answer(loaded)
        assert users(loaded) == {"two"}
        loaded.model.tend(idle=True)
        assert users(loaded) == {"two"}, "the others are still there"
        others[0] = 0.0
        clock.speed = lambda at, name, segment: 1.0 if name == "one" else 2.0
        clock.now += 6
        loaded.model.tend(idle=False)
        assert users(loaded) == {"two"}, "someone waits"
        loaded.model.tend(idle=True)
        for _ in range(100):
            answer(loaded)
        assert users(loaded, "blk") == {"one"}
        assert any("measured again" in why for why in reasons_of(loaded))

    clock.speed = lambda at, name, segment: 1.0 if name == "two" else 9.0
    with LocalModel(model, backends=NAMES, ctx=512, threads=1, planner="measured", eager=True) as llm:
        llm.call(look)


def test_a_start_that_finds_it_quiet_measures_again_what_was_rough(
    model: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that end with their answer never have an idle moment for that."""
    others = [1.0]
    monkeypatch.setattr(f"{PROBE}.cpu_count", lambda: 1)
    monkeypatch.setattr(f"{PROBE}.others_running", lambda: others[0])

    def start() -> tuple[float, bool]:
        """Seconds that it measured, and whether what is kept is rough."""
        began = clock.now
        with LocalModel(model, backends=NAMES, ctx=512, threads=1, planner="measured", eager=True):
            took = clock.now - began
        (kept,) = (dirs().cache / "times").glob("*.json")
        works, _ = read(kept)
        return took, any(cell.rough for cells in works.values() for cell in cells.values())

    clock.speed = lambda at, name, segment: 0.01
    first, second = start(), start()
    assert first[1]
    assert second == (0.0, True), "rough times are used, and nothing is measured beside others again"
    others[0] = 0.0
    quiet, again = start(), start()
    assert quiet[0] > 0
    assert not quiet[1]
    assert again == (0.0, False)


def test_what_only_measuring_needed_is_given_back_beside_others_too(
    model: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{PROBE}.cpu_count", lambda: 1)
    monkeypatch.setattr(f"{PROBE}.others_running", lambda: 1.0)
    # No time is left but for what was never run.
    monkeypatch.setattr("hetrun.executor.autotune.measurement.crowded_measurement.PROBE_BUSY_S", 0.0)

    def brought(loaded: LoadedModel) -> list[str]:
        assert isinstance(loaded.model, PlannedModel)
        assert loaded.model.autotuner is not None
        return [name for name, uses in loaded.model.autotuner.prober._brought.items() if uses]

    clock.speed = lambda at, name, segment: 0.01
    with LocalModel(model, backends=NAMES, ctx=512, threads=1, planner="measured", eager=True) as llm:
        assert llm.call(brought) == []


def reasons_of(loaded: LoadedModel) -> list[str]:
    model = loaded.model
    assert isinstance(model, PlannedModel)
    assert model.autotuner is not None
    return [change.reason for change in model.autotuner.changes]


def noisy(slower: float, noise: float, wild: float = 0.0) -> Speed:
    """Other programs never make work faster, only slower, sometimes by far."""
    chance = random.Random(1)

    def speed(at: float, name: str, segment: Segment) -> float:
        often = 1 + chance.expovariate(1 / noise)
        return often * (slower if name == "two" else 1.0) * (10.0 if chance.random() < wild else 1.0)

    return speed


@pytest.mark.parametrize(
    ("slower", "wild"),
    [
        (0.97, 0.0),
        (1.0, 0.02),
        (1.03, 0.0),
        *(pytest.param(*row, marks=exhaustive) for row in ((0.97, 0.02), (1.0, 0.0), (1.03, 0.02))),
    ],
)
def test_backends_that_are_as_fast_as_each_other_take_no_turns(
    slower: float, wild: float, model: Path, clock: Clock
) -> None:
    assert len(fly(model, clock, 100, noisy(slower, 0.1, wild)).kept) <= 6


def test_what_takes_turns_in_being_fast_is_not_followed_for_ever(model: Path, clock: Clock) -> None:
    def speed(at: float, name: str, segment: Segment) -> float:
        return 2.0 if (at // 3 % 2 == 0) == (name == "one") else 1.0

    changes = fly(model, clock, 240, speed).kept
    assert 2 <= len(changes) <= 40
    assert len([at for at, _ in changes if at > 120]) <= 10


class Late(Simulated):
    """Its libraries are loaded when they are needed, which takes a second."""

    started = False

    def start(self) -> None:
        self.clock.now += 0.0 if self.started else 1.0
        self.started = True


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock(speed=lambda at, name, segment: 0.1 if name == "one" else 0.05)
    monkeypatch.setattr(f"{PROBE}.others_running", lambda: 0.0)
    monkeypatch.setattr("hetrun.executor.autotune.measurement.model_measurement.PROBE_S", 1e4)
    kinds = {"one": Simulated, "two": Late}
    with on(clock, {name: partial(kind, name, clock) for name, kind in kinds.items()}, monkeypatch):
        yield clock


def read_prompts(loaded: LoadedModel, tokens: int, n: int, clock: Clock) -> set[str]:
    """Prompts of some length, with a rest after each; the backends that hold weights then."""
    model = loaded.model
    assert isinstance(model, PlannedModel)
    assert model.autotuner is not None
    for _ in range(n):
        seq = model.alloc()
        model.expect(tokens)
        model.step(Step((Chunk(seq, np.full(tokens, 5), np.array([tokens - 1])),)))
        model.free(seq)
        clock.now += 1.0
        model.tend(idle=True)
    return {name for _, name in model.autotuner._state.held}


def test_what_pays_only_for_prompts_comes_once_they_have_lost_as_much_without_it(
    model: Path, late: Clock
) -> None:
    """A pass of 256 tokens takes 0.06 s, so no single one is worth the second that the other one costs."""
    with LocalModel(model, backends=NAMES, ctx=512, threads=1, planner="measured") as llm:
        assert llm.call(lambda loaded: read_prompts(loaded, 40, 20, late)) == {"one"}
        assert llm.call(lambda loaded: read_prompts(loaded, 256, 10, late)) == {"one"}
        assert llm.call(lambda loaded: read_prompts(loaded, 256, 200, late)) == {"one", "two"}
    options = {"backends": NAMES, "ctx": 512, "threads": 1, "planner": "measured"}
    later = make_plan(Settings.resolve(environ=None, model=str(model), **options))
    assert later.backends == ["one"]
    assert any("two may come later" in note for note in later.notes)


def test_copies_that_were_given_back_have_to_be_missed_for_longer(model: Path, late: Clock) -> None:
    def hesitation(loaded: LoadedModel) -> float:
        model = loaded.model
        assert isinstance(model, PlannedModel)
        assert model.autotuner is not None
        return model.autotuner._residency.hesitation

    with LocalModel(model, backends=NAMES, ctx=512, threads=1, planner="measured") as llm:
        assert llm.call(lambda loaded: read_prompts(loaded, 256, 210, late)) == {"one", "two"}
        assert llm.call(hesitation) == 1.0
        late.speed = lambda at, name, segment: 0.1 if name == "one" else 2.0
        assert llm.call(lambda loaded: read_prompts(loaded, 256, 100, late)) == {"one"}
        assert llm.call(hesitation) >= 2.0


def test_what_was_measured_wrongly_and_is_not_held_is_found_all_the_same(model: Path, clock: Clock) -> None:
    """A backend without weights is lent those of a unit to be compared, and only in idle moments."""
    clock.began = 1e9

    def speed(at: float, name: str, segment: Segment) -> float:
        return SHORT * (1.0 if name == "one" else 0.5 if at else 3.0)

    def weights(loaded: LoadedModel) -> bool:
        model = loaded.model
        assert isinstance(model, PlannedModel)
        assert model.autotuner is not None
        two = model.backends["two"]
        store, units = model._weights.store, model.autotuner.planner.units[1:-1]
        return any(store.holds("two", two.wants(unit.ops)) for unit in units)

    def work(loaded: LoadedModel) -> None:
        model, held = loaded.model, []
        assert not weights(loaded), "measured, and given back"
        clock.began = clock.now
        for _ in range(400):
            seq = model.alloc()
            model.step(Step((Chunk(seq, np.array([5]), np.array([0])),)))
            model.free(seq)
            model.tend()
            held.append(weights(loaded))
            clock.now += 0.1
            model.tend(idle=True)
        assert held[-1]
        layers = [name for scope, name in model.plans.plan(1).places if scope.startswith("blk")]
        assert layers == ["two"]
        assert not held[0]

    clock.speed = speed
    with LocalModel(model, backends=NAMES, ctx=512, threads=1, planner="measured", eager=True) as llm:
        llm.call(work)
