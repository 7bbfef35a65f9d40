"""A loaded model's autotuner, and the pace of its answers; neither is there where plans are fixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetrun.executor.autotune.answer_pace import Pace, pace_of
from hetrun.executor.autotune.autotuner import Autotuner
from hetrun.executor.executor import Executor
from hetrun.executor.pass_observer import PassObserver
from hetrun.executor.plan_prediction import token_rates
from hetrun.executor.steps import Between
from hetrun.graph import Graph
from hetrun.planner.plan import PlanSet
from hetrun.system.progress import Progress


class ModelTuning:
    """Passes on to the autotuner what concerns it, while there is one."""

    def __init__(self, graph: Graph, executor: Executor) -> None:
        self._graph, self._executor = graph, executor
        self.autotuner: Autotuner | None = None
        self._pace: Pace | None = None

    def begin(self, autotuner: Autotuner, progress: Progress | None) -> None:
        """Measure what is not known yet, and plan by it."""
        self.autotuner = autotuner
        autotuner.begin(progress)
        self._pace = Pace(autotuner.forecast, self._graph, self._pass_of_one)

    @property
    def _threads_of_one(self) -> int:
        """With which a pass of one token is planned."""
        return (self.autotuner.planned if self.autotuner else self._executor.plans).plan(1).threads

    def _pass_of_one(self, depth: float) -> float | None:
        """Seconds of a pass of one token, as the planner predicts it for the plan of now: trials of others
        are part of what an answer takes."""
        tuner = self.autotuner
        return tuner.planner.pass_seconds(tuner.planned.plan(1), 1, depth) if tuner else None

    @property
    def keeps_pace(self) -> bool:
        """Whether it wants to know when tokens of answers come."""
        return self._pace is not None

    def observe_token(self, seconds: float, depth: float) -> None:
        """A token came so long after the one before, in a text of this depth."""
        if self._pace:
            self._pace.observe(seconds, depth, self._threads_of_one)

    def interrupt(self) -> None:
        """Something else ran between two tokens of an answer."""
        if self._pace:
            self._pace.interrupt()

    def recover(self, name: str, error: Exception) -> bool:
        """A backend failed in the middle of a step: whether others have its part now."""
        return self.autotuner is not None and self.autotuner.goes_on_without(name, error)

    def expect(self, tokens: int, between: Between | None) -> None:
        """This many tokens of prompts wait."""
        if self.autotuner:
            self.autotuner.expect(tokens, between)

    def tend(self, idle: bool, between: Between | None) -> None:
        """Between two steps: look after the plan."""
        if self.autotuner:
            self.autotuner.tend(idle, between)

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        """Seconds of a step; None: unknown."""
        return self.autotuner.predict(chunks) if self.autotuner else None

    @property
    def promised(self) -> PlanSet:
        """The plans in force, with the speeds that follow from what was measured so far."""
        plans, tuner = self._executor.plans, self.autotuner
        if tuner is None:
            return plans
        pace = pace_of(tuner.forecast, self._graph, self._threads_of_one)
        return replace(plans, rates=token_rates(tuner.planner, tuner.planned, pace))

    @property
    def reason(self) -> str:
        """Why passes run as they do: the last change, also one that was taken back; from any thread."""
        changes = self.autotuner.changes if self.autotuner else ()
        told = (change.reason for change in reversed(changes) if change.became != "proposed")
        return next(told, self._executor.plans.reason)

    def end(self) -> None:
        """Keep what was learnt; plans stay as they are."""
        self.close()
        if self.autotuner:
            self.autotuner = self._pace = None
            self._executor.observe(PassObserver())

    def close(self) -> None:
        """Keep what was learnt."""
        if self.autotuner:
            self.autotuner.close()
