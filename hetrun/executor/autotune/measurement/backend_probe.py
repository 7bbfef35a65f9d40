"""Measures what a backend takes for the parts of a model, by itself."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from os import cpu_count
from time import perf_counter

from hetrun.errors import BudgetError, Cancelled
from hetrun.executor.autotune.backend_pool import BackendPool
from hetrun.executor.autotune.cpu_contention import others_running
from hetrun.executor.autotune.measurement.core_choice import heaviest
from hetrun.executor.autotune.measurement.prober import Prober, price_of_a_turn
from hetrun.executor.autotune.tuned_model import TunedModel
from hetrun.executor.autotune.weight_migration import Weights
from hetrun.planner.segment_cost import CALL
from hetrun.planner.switch_cost import SIZES, turn
from hetrun.planner.trials import BESIDE, Trial, trials_of
from hetrun.system.progress import Progress

log = logging.getLogger(__name__)

TURNS = 16  # runs of two units, to see what it costs that backends take turns
BUSY = 0.5  # threads of others: times would say more about them


class BackendProbe:
    """Knows what can be measured, measures it for a while, and has the forecast learn it."""

    def __init__(self, model: TunedModel, prober: Prober, weights: Weights, pool: BackendPool) -> None:
        self._graph, self._backends, self._planner = model.graph, model.backends, model.planner
        self._executor, self._forecast, self._setup = model.executor, model.forecast, model.setup
        self._prober, self._weights, self._pool = prober, weights, pool
        self.home, _ = Counter(self._setup.home.values()).most_common(1)[0]

    def trials(self, name: str, threads: Sequence[int] = ()) -> list[Trial]:
        """What can be measured of a backend."""
        s, plans, device = self._setup, self._executor.plans, self._backends[name].asynchronous
        units = self._planner.units
        there = {scope for scope, backend in s.home.items() if backend == name}
        home, part = bool(there), there if len(there) < len(s.home) else ()
        at_once = plans.host_ubatch or plans.ubatch
        ubatch = plans.ubatch if device else at_once
        trials = trials_of(
            graph=self._graph,
            units=units,
            backend=name,
            home=home,
            threads=threads or s.threads,
            context=s.context,
            ubatch=ubatch,
            wide=s.wide,
            device=device,
            there=part,
        )
        able = self._planner.costs.able
        forms = {u.form for i, u in enumerate(units) if name in able[i]}
        whole = all(name in some for some in able)
        mine = [t for t in trials if t.form in forms or (t.name == "whole" and whole)]
        return mine + self._planner.more_trials(name, s.context, at_once)

    def knows(self, trial: Trial) -> bool:
        """Whether something was measured, or was to be and took too long."""
        asked = self._forecast.fact(_asked(trial), trial.backend) is not None
        return asked or self._forecast.knows(trial.work)

    @property
    def is_disturbed(self) -> bool:
        """Whether others compute, and not only on cores that are unused here."""
        return others_running() >= (cpu_count() or 1) - self._setup.threads[-1] + BUSY

    def probe(self, name: str, trials: Sequence[Trial], seconds: float, tell: Progress) -> float:
        """Measure for so long, after whatever it takes to start; how long that was."""
        start = perf_counter()
        try:
            self._weights.start(name)
            start = perf_counter()
            if self._forecast.fact(CALL, name) is None:
                self._prober.call(name, self._setup.threads[-1])
            if self._prober.run(trials, start + seconds, tell):
                self.complete(trials)
                self._learn_turns(name, seconds)
                self._learn_beside(name)
                for trial in trials:
                    self._forecast.learn_fact(_asked(trial), name, 1.0)
        except Cancelled:
            raise
        except Exception as e:  # a plugin may fail in any way, and the others go on
            if self._pool.is_home(name):
                raise
            self._pool.exclude(name, e)
        finally:
            self._prober.give_back(name)  # memory is for what plans need
        return perf_counter() - start

    def complete(self, trials: Sequence[Trial], rough: float = 0.0) -> None:
        """Run what was never run, a token at a time: without it nothing is planned, however slow it is."""
        forms = {unit.form for unit in self._planner.units}
        smallest: dict[tuple[str, str], Trial] = {}
        for trial in sorted(trials, key=lambda t: (t.seen, t.tokens * t.sequences, -t.threads)):
            if trial.form in forms:
                smallest.setdefault((trial.form, trial.backend), trial)
        for trial in smallest.values():
            works = [replace(trial.work, threads=n) for n in self._setup.threads]
            if not any(self._forecast.seconds(work, 1, 1.0) for work in works):
                learn = partial(self._forecast.learn, trial.work, *trial.size, rough=rough)
                try:
                    self._prober.measure(trial, learn, once=True)
                except BudgetError as e:
                    # Of what its memory has no room for nothing is placed there.
                    if not self._backends[trial.backend].asynchronous:
                        raise
                    log.debug("%s is not measured on %s: %s", trial.name, trial.backend, e)

    def _learn_turns(self, name: str, most_s: float) -> None:
        """What it costs that this backend and the one that holds most of the model take turns, in passes of
        which some do not take too long."""
        if name == self.home or self._backends[name].asynchronous:
            return
        able, threads, units = self._planner.costs.able, self._setup.threads[-1], self._planner.units
        self._planner.costs.fresh()
        middle, both = len(units) // 2, (name, self.home)
        for tokens in SIZES:
            times = [self._planner.costs.seconds(middle, b, threads, tokens, tokens / 2) for b in both]
            if TURNS * sum(seconds or 0.0 for seconds in times) > most_s:
                return
            price = price_of_a_turn(self._prober, units, able, self.home, name, threads, tokens)
            if price is not None:
                self._forecast.learn_fact(turn(tokens), name, price)

    def _learn_beside(self, name: str) -> None:
        """What the host and weights that cross for a device cost each other."""
        backend, costs = self._backends[name], self._planner.costs
        known = self._forecast.fact(BESIDE, name) is not None
        if known or not backend.asynchronous or self.is_disturbed:
            return
        able = [name in some and self.home in some for some in costs.able]
        for unit in heaviest(self._planner.units, self._planner.nbytes, self.home):
            crosses = any(backend.streams(use) for use in backend.wants(unit.ops))
            if able[self._planner.units.index(unit)] and crosses:
                threads = self._setup.threads[-1]
                here, there = (
                    Trial("beside", unit.form, (unit.ops,), b, threads, 1) for b in (self.home, name)
                )
                self._forecast.learn_fact(BESIDE, name, self._prober.beside(here, there))
                return


def _asked(trial: Trial) -> str:
    """The fact that a probe had its chance to measure something."""
    return f"asked {trial.form} {trial.threads} {trial.sequences > 1}"
