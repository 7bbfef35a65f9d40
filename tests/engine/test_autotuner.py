"""The autotuner on a real model: a backend is avoided where it is slow, and used where it is or becomes fast.

"Slow" is real work done again and again, so it shows in whatever the autotuner measures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.backend import (
    Available,
    Buffer,
    Buffers,
    Descriptor,
    Done,
    Pass,
    PassShape,
    ReadInto,
    Runner,
    Segment,
    WeightUse,
    registry,
)
from hetrun.backends.llamacpp.backend import LlamacppBackend
from hetrun.engine.loaded_model import LoadedModel
from hetrun.errors import BackendError, Cancelled
from hetrun.executor.autotune.autotuner import Autotuner
from hetrun.executor.autotune.explorer import Explorer
from hetrun.executor.autotune.replanner import Replanner
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.online import RATE, PlanConditions
from hetrun.planner.plan import BUCKETS, Placement, PlanSet, make_plans
from hetrun.planner.switch_cost import turn
from hetrun.planner.trials import Trial
from hetrun.planner.weight_sizes import Sizes
from tests.engine.simulated import Clock
from tests.models import tiny
from tests.models.tiny import TinyLlama

AGAIN = 30  # times that slow work is done
SMALL = TinyLlama("small", layers=4, embd=512, ffn=2048, heads=8, kv_heads=4, context=1024, quant="Q8_0")


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough to be worth measuring."""
    return tiny.write_gguf(SMALL, tmp_path_factory.mktemp("models") / "small.gguf")


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs here, and however slow that makes this machine: all is measured, and kept."""
    monkeypatch.setattr("hetrun.executor.autotune.measurement.backend_probe.others_running", lambda: 0.0)
    monkeypatch.setattr("hetrun.executor.autotune.measurement.model_measurement.PROBE_S", 1e4)


class Plugin(LlamacppBackend):
    """ggml under another name, which does what is slow many times over."""

    name = "plugin"
    slow: str = ""
    fails = False

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        return Repeating(super().compile(segment, shape, buffers, kv), segment)


class Repeating:
    """A runner that runs as often as its slowest op asks for."""

    def __init__(self, runner: Runner, segment: Segment) -> None:
        self._runner = runner
        self._scopes = [op.scope for op in segment.ops]

    def submit(self, work: Pass) -> Done:
        if Plugin.fails:
            raise BackendError("the plugin has lost its device")
        slow = Plugin.slow and any(Plugin.slow in scope for scope in self._scopes)
        for _ in range(AGAIN if slow else 1):
            done = self._runner.submit(work)
        return done

    def close(self) -> None:
        self._runner.close()


@pytest.fixture
def plugin() -> Iterator[None]:
    """The plugin, preferred to the backend it is compared with."""
    remove = registry.register(
        Descriptor("plugin", lambda: Available("a test"), Plugin, "a test", preference=200)
    )
    Plugin.slow = ""
    yield
    Plugin.fails = False
    remove()


def autotuner_of(loaded: LoadedModel) -> Autotuner:
    model = loaded.model
    assert isinstance(model, PlannedModel)
    assert model.autotuner is not None
    return model.autotuner


def users(plans: PlanSet, tokens: int, scope: str) -> set[str]:
    """The backends that run a scope."""
    return {s.backend for s in plans.plan(tokens).segments for op in s.ops if scope in op.scope}


def run_for(llm: LocalModel, seconds: float, until: Sequence[str], scope: str) -> None:
    """Steps of one token until the scope is run by one of these, or the time is over."""

    def steps(loaded: LoadedModel) -> None:
        model, end = loaded.model, perf_counter() + seconds
        seq = model.alloc()
        while perf_counter() < end:
            if users(model.plans, 1, scope) <= set(until):
                break
            if model.length(seq) == model.context:
                model.truncate(seq, 0)
            model.step(Step((Chunk(seq, np.array([5]), np.array([0])),)))
            model.tend()
        model.free(seq)

    llm.call(steps)


# It compares measured times, which other programs change; test_autotuner_clock.py has the same on a clock.
@pytest.mark.alone
@pytest.mark.slow
def test_a_backend_that_becomes_fast_is_used_within_seconds(
    plugin: None, small_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hetrun.executor.autotune")
    Plugin.slow = ".ffn"
    with LocalModel(
        small_model, backends=["plugin", "reference"], ctx=512, threads=1, planner="measured", eager=True
    ) as llm:
        assert users(llm.plan, 1, "blk.0.ffn") == {"reference"}, "it should be avoided where it is slow"
        price = llm.call(lambda loaded: autotuner_of(loaded).forecast.fact(turn(1), "reference"))
        assert price is not None
        assert 0 <= price < 0.1, "what changing between the two costs was measured"
        Plugin.slow = ""
        # 1 to 3 s where nothing else runs; test_autotuner_clock.py is exact, also about the reason.
        run_for(llm, 60, ["plugin"], "blk.0.ffn")
        changes = llm.call(lambda loaded: [c.reason for c in autotuner_of(loaded).changes])
        assert users(llm.plan, 1, "blk.0.ffn") == {"plugin"}
        assert any("to plugin" in why and "less time expected" in why for why in changes)
        assert all(why in caplog.text for why in changes)
        # The answer goes on, and says the same as before.
        assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=4, temperature=0))[0].tokens) == 4


@pytest.mark.slow
def test_the_second_start_measures_nothing(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetrun.executor.autotune.measurement import prober

    measured: list[str] = []
    before = prober.Prober.measure

    def measure(
        self: prober.Prober,
        trial: Trial,
        hear: Callable[[float], None] | None = None,
        once: bool = False,
    ) -> None:
        measured.append(trial.name)
        before(self, trial, hear, once)

    def start() -> int:
        measured.clear()
        with LocalModel(small_model, backends=["llamacpp"], ctx=256, planner="measured") as llm:
            assert llm.plan.expected["1"].segments, "what it was planned from is part of the plan"
        return len(measured)

    monkeypatch.setattr(prober.Prober, "measure", measure)
    assert start() > 10
    assert start() == 0


@pytest.mark.slow
def test_an_eager_model_brings_in_what_pays_after_a_change_when_it_is_idle(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def replan(self: Replanner, cause: str, waiting: int = 0, eager: bool = False) -> bool:
        asked.append((cause, eager))
        return False

    with LocalModel(small_model, backends=["llamacpp"], ctx=256, planner="measured", eager=True) as llm:
        monkeypatch.setattr(Replanner, "replan", replan)
        monkeypatch.setattr("hetrun.executor.autotune.drift.Watcher.drifted", lambda self: "it became slow")
        for module in ("autotuner", "comparison_scheduler"):
            at = f"hetrun.executor.autotune.{module}.perf_counter"
            monkeypatch.setattr(at, lambda: perf_counter() + 1000)
        monkeypatch.setattr("hetrun.executor.autotune.autotuner.LOOK_S", 1000.0)
        llm.call(lambda loaded: autotuner_of(loaded).tend())
        assert asked == [("it became slow", False)]
        for _ in range(2):
            llm.call(lambda loaded: autotuner_of(loaded).tend(idle=True))
        assert asked[1:] == [("it became slow", True)]


def test_tiny_models_are_not_measured(tmp_path: Path) -> None:
    with LocalModel(tiny.write_gguf(TinyLlama("tiny"), tmp_path / "tiny.gguf"), planner="measured") as llm:
        assert not llm.plan.expected


@pytest.mark.slow
def test_static_is_an_option(small_model: Path) -> None:
    with LocalModel(small_model, backends=["llamacpp"], planner="static", ctx=256) as llm:
        assert not llm.plan.expected
        assert llm.plan.plan(1).segments[0].why.startswith(("first in the fixed order", "the only backend"))


def test_a_backend_that_is_told_to_stop_has_not_failed(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(
        self: Explorer, now: PlanConditions, allowed: Collection[str], crowded: bool, idle: bool
    ) -> None:
        raise Cancelled("the computation was stopped")

    monkeypatch.setattr(Explorer, "step", stopped)
    with LocalModel(
        small_model, backends=["llamacpp", "reference"], ctx=256, planner="measured", eager=True
    ) as llm:

        def look(loaded: LoadedModel) -> set[str]:
            autotuner = autotuner_of(loaded)
            autotuner._next_look = autotuner._comparisons.next_at = 0.0
            with pytest.raises(Cancelled):
                autotuner.tend()
            return autotuner._pool.refused

        assert llm.call(look) == set()


@pytest.fixture
def second() -> Iterator[None]:
    """The plugin behind the backend that holds the model."""
    remove = registry.register(
        Descriptor("plugin", lambda: Available("a test"), Plugin, "a test", preference=1)
    )
    Plugin.slow = ""
    yield
    Plugin.fails = False
    remove()


def test_a_backend_that_fails_in_an_answer_is_left_out_and_the_answer_goes_on(
    small_model: Path, second: None
) -> None:
    prompt, names = list(range(20, 60)), ["llamacpp", "plugin"]
    with LocalModel(small_model, backends=["llamacpp"], ctx=256, threads=1) as llm:
        right = llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0))[0].tokens
    with LocalModel(small_model, backends=names, ctx=256, threads=1, planner="measured") as llm:

        def place(loaded: LoadedModel) -> set[str]:
            """The second layer on the plugin, whatever is faster."""
            autotuner, assured = autotuner_of(loaded), loaded.model
            assert isinstance(assured, PlannedModel)
            units = enumerate(autotuner.planner.units)
            autotuner._explorer.close()
            autotuner._weights.bring(
                frozenset((i, "plugin") for i, u in units if u.scope.startswith("blk.1"))
            )
            placed = Placement("", "llamacpp", "a test"), Placement("blk.1", "plugin", "a test")
            plans = make_plans(assured.graph, {b: (1, placed) for b in BUCKETS})
            autotuner._active_plan.adopt(replace(autotuner._active_plan.planned, plans=plans))
            autotuner._next_look = float("inf")  # however long the answer takes, nothing else is planned
            return {s.backend for s in assured.plans.plan(1).segments}

        assert llm.call(place) == set(names)
        found = []
        for event in llm.stream(prompt, SamplingParams(max_tokens=12, temperature=0)):
            found += [event.token] if event.token is not None else []
            Plugin.fails = bool(found)  # before passes could show that it is the slower one
        assert found == right
        reasons = llm.call(lambda loaded: [change.reason for change in autotuner_of(loaded).changes])
        assert any("plugin failed" in why for why in reasons)
        assert llm.plan.backends == ["llamacpp"]


def test_a_model_that_loads_weights_stands_aside_after_each(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what ran meanwhile is not counted as time that loading took."""
    with LocalModel(small_model, backends=["llamacpp", "reference"], ctx=256, planner="measured") as llm:

        def load(loaded: LoadedModel) -> None:
            autotuner, calls = autotuner_of(loaded), 0
            copies = frozenset((i, "reference") for i in range(3))
            backends, units = autotuner._weights._backends, autotuner.planner.units
            weights = {u for i, b in copies for u in backends[b].wants(units[i].ops)}
            autotuner._weights._store.drop("reference", weights)
            sizes = Sizes(dict.fromkeys(copies, 1 << 30), dict.fromkeys(copies, 0))
            monkeypatch.setattr(autotuner.planner, "sizes", sizes)
            clock, upload = Clock(), backends["reference"].upload

            def slowly(wanted: WeightUse, read: ReadInto) -> Buffer:
                clock.now += 0.25
                return upload(wanted, read)

            def between() -> None:
                nonlocal calls
                calls += 1
                clock.now += 10
                seq = loaded.model.alloc()
                for _ in range(3):
                    loaded.model.step(Step((Chunk(seq, np.array([5]), np.array([0])),)))
                loaded.model.free(seq)

            monkeypatch.setattr(backends["reference"], "upload", slowly)
            for module in ("yield_point", "weight_migration"):
                monkeypatch.setattr(f"hetrun.executor.autotune.{module}.perf_counter", clock)
            with autotuner.aside.for_the_sake_of(between):
                autotuner._weights.bring(copies)
            assert calls == len(weights) > 3
            assert autotuner.forecast.fact(RATE, "reference") == 3 * (1 << 30) / (0.25 * len(weights))

        llm.call(load)
