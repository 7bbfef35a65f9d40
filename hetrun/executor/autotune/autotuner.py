"""The autotuner: keeps the plan good while the model runs.

Before the first step it measures what is not known of this machine yet. Between steps it looks whether times
have drifted, tries now and then what is not in use, and puts a better plan into force when there is one.
Everything here happens on the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter

from hetrun.backend import Backend, Pass
from hetrun.executor.autotune.active_plan import ActivePlan
from hetrun.executor.autotune.backend_pool import BackendPool
from hetrun.executor.autotune.comparison_scheduler import ComparisonScheduler
from hetrun.executor.autotune.cpu_contention import OtherPrograms
from hetrun.executor.autotune.crowd_watch import CrowdWatch
from hetrun.executor.autotune.drift import Watcher
from hetrun.executor.autotune.explorer import Explorer
from hetrun.executor.autotune.failure_recovery import FailureRecovery
from hetrun.executor.autotune.measurement.model_measurement import ModelMeasurement
from hetrun.executor.autotune.measurement.prober import Prober
from hetrun.executor.autotune.replanner import Replanner
from hetrun.executor.autotune.residency_tuner import LEAST_WAITING, ResidencyTuner
from hetrun.executor.autotune.setup import Setup, home_of, planner_for
from hetrun.executor.autotune.state import Change, TuningState
from hetrun.executor.autotune.tuned_model import TunedModel
from hetrun.executor.autotune.tuning_parts import TuningParts
from hetrun.executor.autotune.weight_migration import Weights
from hetrun.executor.autotune.yield_point import YieldPoint
from hetrun.executor.compiled_plan import PassTiming
from hetrun.executor.executor import Executor
from hetrun.executor.pass_observer import PassObserver
from hetrun.executor.steps import Between
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import Graph
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.expert_stats import Choices, path_of
from hetrun.planner.plan import PlanSet
from hetrun.system.progress import Progress

log = logging.getLogger(__name__)

LOOK_S = 0.5  # between two looks at what has drifted
PLANNING = 0.02  # of the time goes into planning anew
AGAIN_S = 5.0  # until it is seen whether others still compute...
REFINED_S = 300.0  # ...and once everything was measured again


class TunedPasses(PassObserver):
    """Passes of a model that is tuned: counted by plan, and asked now and then which experts they choose."""

    def __init__(self, choices: Choices, active_plan: ActivePlan) -> None:
        self._choices, self._active_plan = choices, active_plan

    def prepare(self, work: Pass) -> None:
        self._choices.ask(work)

    def observe(self, ran: PassTiming) -> None:
        self._active_plan.observe(ran)


class Autotuner:
    """Steers one model."""

    def __init__(
        self,
        graph: Graph,
        backends: Mapping[str, Backend],
        store: WeightStore,
        kv: KvCache,
        executor: Executor,
        forecast: WorkTimes,
        setup: Setup,
    ) -> None:
        self.forecast, self._setup = forecast, setup
        self._next_look = self._next_refining = 0.0
        self._cause = ""  # of the last new plan, if it was not checked since whether more weights would pay
        self.planner = planner = planner_for(graph, backends, forecast, setup)
        self.choices = Choices(graph)
        self._choices_at = path_of(graph) if setup.memory else None
        if self._choices_at:
            self.choices.load(self._choices_at)
        planner.listen(self.choices.likely)
        started = {name for name, backend in backends.items() if backend.started}
        self._state = TuningState(home_of(planner, setup), started)
        self.aside = YieldPoint(executor)
        self.prober = Prober(graph, backends, store, kv, forecast, setup.context)
        model = TunedModel(
            graph=graph,
            backends=backends,
            store=store,
            kv=kv,
            executor=executor,
            forecast=forecast,
            setup=setup,
            planner=planner,
        )
        others = OtherPrograms()
        # With one number of threads there is nothing to choose, whatever others do.
        self._crowd = CrowdWatch(others.look if len(setup.threads) > 1 else lambda at: 0.0)
        self._active_plan = ActivePlan(model, self._crowd, others.count)
        executor.observe(TunedPasses(self.choices, self._active_plan))
        self._pool = BackendPool(setup, self._state, self._active_plan)
        self._weights = Weights(model, self._state, self.aside)
        self._measuring = ModelMeasurement(model, self.prober, self._weights, self._pool)
        self._watcher = Watcher(planner, forecast)
        self._explorer = Explorer(model, self.prober)
        parts = TuningParts(
            model=model,
            state=self._state,
            pool=self._pool,
            weights=self._weights,
            active_plan=self._active_plan,
            crowd=self._crowd,
            explorer=self._explorer,
        )
        self._replanner = Replanner(parts, self._watcher)
        self._comparisons = ComparisonScheduler(parts, self._replanner)
        self._recovery = FailureRecovery(parts, self._replanner)
        self._residency = ResidencyTuner(parts, self._replanner, self._measuring, self.aside)

    @property
    def changes(self) -> Sequence[Change]:
        """Every change of plan, with its reason."""
        return self._state.changes

    @property
    def planned(self) -> PlanSet:
        """The plans in force, without those on trial."""
        return self._active_plan.planned

    # --- before the first step

    def begin(self, progress: Progress | None = None) -> None:
        """Measure what is not known, and make the first plan from it."""
        names = self._pool.started()
        if self._setup.eager:
            names += filter(self._weights.may_start, self._pool.not_started())
        if tried := self._measuring.begin(names, progress):
            self._take_threads(tried)
        self.save()
        if progress:
            progress(1.0)
        self._replanner.replan("the first plan", eager=self._setup.eager, first=True)

    def _take_threads(self, tried: Mapping[int, float]) -> None:
        if why := self._active_plan.adopt_threads(tried):
            self._state.note(why)

    def _settle_threads(self, idle: bool = False) -> None:
        """See with how many threads work is fastest now, before a request waits for a pass."""
        start = perf_counter()
        if tried := self._measuring.threads(self._crowd.crowded):
            self._take_threads(tried)
        if not idle:
            self._active_plan.budget.book(perf_counter(), perf_counter() - start)

    # --- between steps

    def expect(self, waiting: int, between: Between | None = None) -> None:
        """`waiting` tokens of prompts wait: another backend may be worth bringing in for them."""
        with self.aside.for_the_sake_of(between):
            for change in self._active_plan.look(perf_counter(), rested=True):
                self._state.record(change)
            if self._crowd.is_unsettled and waiting >= LEAST_WAITING:
                self._settle_threads()
            self._residency.expect(waiting)

    def tend(self, idle: bool = False, between: Between | None = None) -> None:
        """Look after the plan; costs next to nothing between two looks.

        What has to be brought in for a better one waits for an `idle` moment, as it takes seconds.
        """
        with self.aside.for_the_sake_of(between):
            now = perf_counter()
            if idle:
                self._use_rest(now)
            for change in self._active_plan.look(now, rested=idle):
                self._state.record(change)
            if self._crowd.is_unsettled and (idle or self._comparisons.has_time(now)):
                self._settle_threads(idle)
            self._comparisons.advance(now, idle)
            if now >= self._next_look:
                self._next_look = now + LOOK_S
                self._look(now)

    def _use_rest(self, now: float) -> None:
        """What takes seconds, while no request waits."""
        eager = self._setup.eager
        if self._cause and eager:
            cause, self._cause = self._cause, ""
            self._replanner.replan(cause, eager=True)
        if now >= self._next_refining:
            self._refine(now)
        if not eager:
            self._residency.bring_in(now)

    def _look(self, now: float) -> None:
        """Plan anew if what the plan rests on has changed."""
        if now < self._watcher.ready_at:
            return
        cause = self._comparisons.take_news() or self._watcher.drifted()
        cause = cause or self._watcher.moved(self._replanner.now())
        if cause := cause or self.planner.surprised() or self._active_plan.surprised():
            self._cause = cause
            start = perf_counter()
            self._replanner.replan(cause)
            end = perf_counter()
            self._watcher.rest(end, (end - start) / PLANNING)

    def _refine(self, now: float) -> None:
        """Measure again, in quiet, what was measured beside others; give back what is not used."""
        self._next_refining = now + AGAIN_S
        names = self._pool.started()
        if self._measuring.due(names):
            self._explorer.close()  # it may have been lent some weights
            self._measuring.refine(names, self.aside)
            self._next_refining = now + REFINED_S
            why = "measured again without other programs"
            self._state.record(Change(now, why))
            self._replanner.replan(why, eager=self._setup.eager, first=True)
        self._residency.give_back()

    def goes_on_without(self, name: str, error: Exception) -> bool:
        """A backend failed in the middle of a step: whether the others can take the same step."""
        return self._recovery.recover(name, error)

    # --- what follows

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        """Seconds of a step: for each sequence its tokens, and how many come before them; None: unknown."""
        return self._active_plan.predict(chunks)

    def close(self) -> None:
        """Give back what a comparison holds, and keep what was measured."""
        self._explorer.close()
        self.save()

    def save(self) -> None:
        """Keep what was measured for the next start."""
        if self._setup.memory is None:
            return
        try:
            self.forecast.save(self._setup.memory)
            if self._choices_at:
                self.choices.save(self._choices_at)
        except OSError as e:
            log.debug("times were not saved: %s", e)
