"""What steps take, as the model predicts it or else as it was measured, and how long answers may wait."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from hetrun.engine.sequence import Chosen, Running
from hetrun.executor.interface import Model
from hetrun.system.ema import smoothed

# While prompts are computed, a running answer's tokens come at most so many times as far apart as without.
STRETCH = 2.5
UNKNOWN_S = 0.02  # a step of answers, before one was measured
SMOOTHING = 0.2
REMEMBERED = 512  # predictions, which change slowly; then all are asked for again
DEPTHS = 256  # tokens: steps at about the same depth take about the same time


class Pace:
    """Knows what a step takes before it runs."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._predicted: dict[tuple[int, int, int], float | None] = {}
        self._plans: object = None  # by which they were predicted
        self._measured: dict[int, float] = {}  # steps of answers, by the bits of their number
        self._per_token = 0.0  # of prompts, measured

    def seconds(self, chosen: Chosen) -> float | None:
        """What a step takes; None where the model cannot say."""
        if self._plans is not self._model.plans or len(self._predicted) >= REMEMBERED:
            self._predicted.clear()
            self._plans = self._model.plans
        tokens = sum(n for _, n in chosen)
        seen = sum(n * (r.computed + n / 2) for r, n in chosen) / max(tokens, 1)
        key = (len(chosen), tokens, int(seen) // DEPTHS)
        if key not in self._predicted:
            self._predicted[key] = self._model.predict([(n, float(r.computed)) for r, n in chosen])
        return self._predicted[key]

    def quiet(self, answers: Sequence[Running], joining: Sequence[Running]) -> float:
        """What a step of these answers takes by itself, once those that join have begun to answer, too."""
        seconds = self.seconds([(r, 1) for r in (*answers, *joining)])
        return self._measured_for(len(answers) + len(joining)) if seconds is None else seconds

    def _measured_for(self, n: int) -> float:
        known = [b for b in self._measured if b <= n.bit_length()]
        return self._measured[max(known)] if known else UNKNOWN_S

    def saw(self, chosen: Chosen, seconds: float) -> None:
        """A step took so long."""
        tokens = sum(n for _, n in chosen)
        if all([r.answers for r, _ in chosen]):
            bits = tokens.bit_length()
            self._measured[bits] = smoothed(self._measured.get(bits), seconds, SMOOTHING)
        else:
            self._per_token = smoothed(self._per_token or None, seconds / tokens, SMOOTHING)

    def guessed(self, chosen: Chosen, quiet: float) -> float:
        """What a step of answers and prompts takes, where the model cannot say: from steps that ran."""
        prompts = sum(n for r, n in chosen if r.missing > 1)
        return quiet + self._per_token * prompts


class Clock:
    """The time of a step, without that of the steps that ran while it stood aside."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._stats = model.stats
        self._native = model.native_seconds - self._stats.native_seconds
        self._start = perf_counter() - self._stats.step_seconds

    def seconds(self) -> float:
        """Until now."""
        return perf_counter() - self._stats.step_seconds - self._start

    def stop(self) -> None:
        """Book it."""
        native = self._model.native_seconds - self._stats.native_seconds - self._native
        self._stats.step(self.seconds(), native)
