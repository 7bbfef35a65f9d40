"""Copies of weights for further backends: brought in once they would have paid, and given back unused."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

from hetrun.executor.autotune.active_plan import FEW
from hetrun.executor.autotune.measurement.model_measurement import PROBE_S, ModelMeasurement
from hetrun.executor.autotune.replanner import Replanner
from hetrun.executor.autotune.tuning_parts import TuningParts
from hetrun.executor.autotune.yield_point import YieldPoint
from hetrun.planner.online import WORTH
from hetrun.planner.residency import Copy
from hetrun.system.units import format_bytes

LEAST_WAITING = 64  # tokens that are read in no time anyway
UNKNOWN_START_S = 2.0  # for loading a backend that was never loaded here: a longer prompt is worth a try...
UNKNOWN_LONG_S = 2 * UNKNOWN_START_S  # ...and prompts of the last minutes that took so long in all
SPENT_S = 1.0  # in passes, until it is seen once more what would have paid for them
PLANNING = 0.02  # of the time goes into seeing that
UNUSED_S = 60.0  # for which copies of weights stay that do not pay now


class ResidencyTuner:
    """Decides which backends have copies of weights besides those that they hold from the beginning."""

    def __init__(
        self, parts: TuningParts, replanner: Replanner, measuring: ModelMeasurement, aside: YieldPoint
    ) -> None:
        self.hesitation = 1.0  # how much more must have been lost for copies: more each time that some went
        self._planner, self._executor = parts.model.planner, parts.model.executor
        self._state, self._pool, self._weights = parts.state, parts.pool, parts.weights
        self._active_plan, self._crowd = parts.active_plan, parts.crowd
        self._explorer, self._replanner = parts.explorer, replanner
        self._measuring, self._aside = measuring, aside
        self._asked = LEAST_WAITING  # tokens for which nothing was worth bringing in
        self._next_at_s = 0.0  # seconds of passes after which it is seen what would have paid
        self._unused = dict[Copy, float]()  # copies that do not pay, and since when

    def expect(self, waiting: int) -> None:
        """`waiting` tokens of prompts wait: another backend may be worth bringing in for them."""
        if waiting <= self._asked:
            return  # it was not worth it for as many
        crowded = self._crowd.crowded
        for name in self._pool.not_started():
            trying = not crowded and self._weights.may_start(name) and self._worth_a_try(waiting)
            if trying:
                self._try_unknown(name)
        changed = self._replanner.replan(f"{waiting} tokens wait", waiting=waiting)
        self._asked = LEAST_WAITING if changed else waiting

    def bring_in(self, now: float) -> None:
        """Copies of weights without which passes of the last minutes have lost more than they cost."""
        usage = self._active_plan.usage
        if usage.seconds < self._next_at_s:
            return
        tokens = {b: n / self.hesitation for b, n in usage.tokens(now).items() if b not in FEW}
        for name in self._pool.not_started():
            trying = self._crowd.quiet and self._weights.may_start(name)
            if trying and self._seconds_of(tokens) > UNKNOWN_LONG_S:
                self._try_unknown(name)
        if tokens:
            self._replanner.replan("prompts have taken longer without it", ran=tokens)
        took = perf_counter() - now
        self._next_at_s = usage.seconds + max(SPENT_S, took / PLANNING)

    def give_back(self) -> None:
        """Copies that no plan in force has used for a while, or that have gained next to nothing: to bring
        them back would take longer than a burst that makes their plan look bad."""
        copies, now, home = self._state.copies, perf_counter(), self._state.home
        used = copies & self._active_plan.used()
        if used and self._active_plan.gain(home, self._replanner.now()) < WORTH:
            used = frozenset()
        self._unused = since = {c: self._unused.get(c, now) for c in copies - used}
        old = frozenset(c for c in since if now - since[c] >= UNUSED_S)
        if old and not used:
            self._active_plan.prefer(home | (copies - old))
        idle = old - self._active_plan.wanted()
        if idle:
            names = ", ".join(sorted({name for _, name in idle}))
            size = format_bytes(self._planner.sizes.moved(idle))
            self._replanner.drop(idle)
            self._active_plan.usage.clear()
            self.hesitation *= 2
            why = f"{size} of weights copied for {names} were unused, or saved almost no time"
            self._state.note(why, "given back")

    def _worth_a_try(self, waiting: int) -> bool:
        """Whether a prompt takes so long that a backend that was never measured may be tried on it."""
        ubatch = self._active_plan.planned.ubatch
        seconds = self._active_plan.predict_pass(min(waiting, ubatch), waiting / 2)
        return seconds is not None and seconds * waiting / ubatch > UNKNOWN_START_S

    def _seconds_of(self, tokens: Mapping[str, float]) -> float:
        """What passes of these tokens take now."""
        found, ubatch, now = 0.0, self._active_plan.planned.ubatch, self._replanner.now()
        for bucket, n in tokens.items():
            size, depth = self._planner.point(bucket, ubatch, now)
            found += (self._active_plan.predict_pass(size, depth) or 0.0) * n / size
        return found

    def _try_unknown(self, name: str) -> None:
        """Measure a backend of which nothing is known yet."""
        if trials := self._measuring.unknown(name):
            self._explorer.close()  # it may have been lent some weights
            self._measuring.probe(name, trials, PROBE_S / 4, self._aside)
            self._executor.forget_threads()
