"""Measures beside other programs: everything runs on all backends in turn, so that whatever the others do
happens to all of them. These times are kept, and marked as rough."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from time import perf_counter

from hetrun.errors import Cancelled
from hetrun.executor.autotune.backend_pool import BackendPool
from hetrun.executor.autotune.measurement.backend_probe import BackendProbe
from hetrun.executor.autotune.measurement.prober import HASTY_DOUBT, Prober
from hetrun.executor.autotune.measurement.survey import compared
from hetrun.executor.autotune.tuned_model import TunedModel
from hetrun.planner.trials import Trial

PROBE_BUSY_S = 2.0  # a rough idea must do
SIZES_BESIDE = (1, 16, 64, 512)  # tokens of the first passes
LEAST_RUNS = 2  # that must fit into the time that is left
SHORT = 0.2  # of the time of the longest part: what takes less is measured at one size
ROUNDS = 2  # of comparisons before the first step, as a user waits for that


class CrowdedMeasurement:
    """Measures for one model, before its first step."""

    def __init__(self, model: TunedModel, prober: Prober, probe: BackendProbe, pool: BackendPool) -> None:
        self._backends, self._planner = model.backends, model.planner
        self._executor, self._forecast = model.executor, model.forecast
        self._prober, self._probe, self._pool = prober, probe, pool

    def measure(self, names: Sequence[str], threads: int) -> None:
        """Measure beside other programs, one size of everything before the next: nothing is planned of a
        model of which something was never measured."""
        for name in names:  # a device that works by itself has no part in the crowd
            alone = self._backends[name].asynchronous
            mine = self._probe.trials(name, (threads,)) if alone else []
            self._probe.probe(name, mine, PROBE_BUSY_S if alone else 0.0, lambda part: None)
        start = perf_counter()
        groups: dict[tuple[str, int, int, int], list[Trial]] = {}
        for name in names:
            for t in self._probe.trials(name, (threads,)) if name not in self._pool.refused else ():
                if t.name != "whole" and not self._backends[name].asynchronous:
                    groups.setdefault((t.form, t.tokens, t.seen, t.sequences), []).append(t)
        units = {unit.form for unit in self._planner.units}

        def by_size(trials: Sequence[Trial]) -> tuple[bool, int, int]:
            """The smallest pass first, which costs least, and then how times grow with passes. Parts of
            units come after them: without units nothing is planned."""
            n, _ = trials[0].size
            size = SIZES_BESIDE.index(n) if n in SIZES_BESIDE else len(SIZES_BESIDE)
            return trials[0].form not in units, trials[0].seen, size

        for _, some in groupby(sorted(groups.values(), key=by_size), by_size):
            for trials in self._longest_first(list(some)):
                left = start + PROBE_BUSY_S - perf_counter()
                trials = [t for t in trials if t.backend not in self._pool.refused]
                if left > 0 and self._expected(trials) < left / LEAST_RUNS:
                    self._compare_or_probe(trials)
        every = [t for trials in groups.values() for t in trials]
        try:
            self._probe.complete([t for t in every if t.backend not in self._pool.refused], HASTY_DOUBT)
        finally:
            for name in names:
                self._prober.give_back(name)  # memory is for what plans need
        self._executor.forget_threads()

    def _longest_first(self, groups: Sequence[Sequence[Trial]]) -> Sequence[Sequence[Trial]]:
        """What takes next to no time was measured once, and that is enough."""
        known = [(self._expected(trials), at) for at, trials in enumerate(groups)]
        longest = max(known)[0]
        return [groups[at] for took, at in sorted(known, reverse=True) if took >= SHORT * longest]

    def _expected(self, trials: Sequence[Trial]) -> float:
        """Seconds of one run of each, as passes of other sizes say."""
        return sum(self._forecast.seconds(t.work, *t.size) or 0.0 for t in trials)

    def _compare_or_probe(self, trials: Sequence[Trial]) -> None:
        try:
            self._compare(trials)
        except Cancelled:
            raise
        except Exception:  # one of them fails: which one it is shows when each runs by itself
            for t in trials:
                self._probe.probe(t.backend, [t], PROBE_BUSY_S, lambda part: None)

    def _compare(self, trials: Sequence[Trial]) -> None:
        try:
            found = compared(self._prober, trials, True, ROUNDS)
        finally:
            for name in {t.backend for t in trials}:
                self._prober.give_back(name)
        for trial, (seconds, _) in zip(trials, found, strict=True):
            self._forecast.learn(trial.work, *trial.size, seconds, HASTY_DOUBT)
