"""What is measured before the first step, and once more when it is quiet.

On a quiet machine each backend is probed by itself. Beside other programs everything is run on all backends
in turn, so that whatever the others do happens to all of them; these times are kept, and marked as rough.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from os import cpu_count
from time import perf_counter

from hetrun.errors import BudgetError, Cancelled
from hetrun.executor.autotune.backend_pool import BackendPool
from hetrun.executor.autotune.core_choice import heaviest, take_seats
from hetrun.executor.autotune.cpu_contention import others_running
from hetrun.executor.autotune.prober import HASTY_DOUBT, Prober, price_of_a_turn
from hetrun.executor.autotune.survey import by_threads, compared
from hetrun.executor.autotune.tuned_model import TunedModel
from hetrun.executor.autotune.weight_migration import Weights
from hetrun.planner.segment_cost import CALL
from hetrun.planner.switch_cost import SIZES, turn
from hetrun.planner.trials import BESIDE, Trial, trials_of
from hetrun.system.progress import Progress, stretch

log = logging.getLogger(__name__)

PROBE_S = 8.0  # that a first use may take to measure
LEAST_SHARE = 0.5  # of that, divided by all, for each backend, whatever others have taken
TURNS = 16  # runs of two units, to see what it costs that backends take turns
PROBE_BUSY_S = 2.0  # while others compute: a rough idea must do
SETTLING = 16  # tokens of the work with which threads are compared
BUSY = 0.5  # threads of others: times would say more about them
SIZES_BESIDE = (1, 16, 64, 512)  # tokens of the first passes there
LEAST_RUNS = 2  # that must fit into the time that is left
SHORT = 0.2  # of the time of the longest part: what takes less is measured at one size
ROUNDS = 2  # of comparisons before the first step, as a user waits for that


class ModelMeasurement:
    """Measures for one model."""

    def __init__(self, model: TunedModel, prober: Prober, weights: Weights, pool: BackendPool) -> None:
        self._graph, self._backends, self._planner = model.graph, model.backends, model.planner
        self._executor, self._forecast, self._setup = model.executor, model.forecast, model.setup
        self._prober, self._weights, self._pool = prober, weights, pool
        self._home, _ = Counter(self._setup.home.values()).most_common(1)[0]

    def begin(self, names: Sequence[str], progress: Progress | None) -> Mapping[int, float]:
        """What is not known of these backends, and again what was measured beside others that are gone; what
        the same work takes with each number of threads, where that was tried, because others compute."""
        wanted = [name for name in names if self.unknown(name)]
        take_seats(self._prober, self._planner, self._forecast, self._setup)
        if self._disturbed():
            tried = self.threads(crowded=True)
            best = min(tried, key=lambda n: tried[n], default=self._setup.threads[-1])
            self._in_turn(wanted, best)
            return tried
        # A command that ends with its answer has no idle moment in which this would be done later.
        if rough := [name for name in names if self._rough([name])]:
            self.refine(rough, progress or (lambda part: None))
        left = PROBE_S
        # What works by itself is quick, and gains most.
        for at, name in enumerate(sorted(wanted, key=lambda n: not self._backends[n].asynchronous)):
            tell = stretch(progress, at / len(wanted), (at + 1) / len(wanted))
            share = max(left / (len(wanted) - at), LEAST_SHARE * PROBE_S / len(wanted))
            left -= self.probe(name, self._trials(name), share, tell)
        if wanted:
            self._executor.forget_threads()
        return {}

    def unknown(self, name: str) -> list[Trial]:
        """What should be measured of a backend: nothing, if it was."""
        trials = self._trials(name)
        known = [self._known(t) for t in trials]
        return [] if all(known) or self._rough([name]) else trials

    def due(self, names: Sequence[str]) -> bool:
        """Whether something was measured beside other programs, and none computes any more."""
        return self._rough(names) and not self._disturbed()

    def refine(self, names: Sequence[str], tell: Progress) -> None:
        """Measure it again."""
        for name in names:
            self.probe(name, self._trials(name), PROBE_S / 4 / len(names), tell)
        self._forecast.forget_rough(names)
        self._executor.forget_threads()

    def _rough(self, names: Iterable[str]) -> bool:
        """Whether anything that is known of backends was measured beside other programs."""
        forms = {unit.form for unit in self._planner.units}
        works = [w for w in self._forecast.works() if w.form in forms and w.backend in names]
        return any(self._forecast.rough(work) for work in works)

    def _disturbed(self) -> bool:
        """Whether others compute, and not only on cores that are unused here."""
        return others_running() >= (cpu_count() or 1) - self._setup.threads[-1] + BUSY

    def threads(self, crowded: bool) -> Mapping[int, float]:
        """What the same work takes with each number of threads now; empty: there is one number only."""
        counts = self._setup.threads
        if len(counts) < 2:
            return {}
        unit = heaviest(self._planner.units, self._planner.nbytes, self._home)[0]
        trial = Trial("threads", unit.form, (unit.ops,), self._home, counts[-1], SETTLING)
        found = by_threads(self._prober, trial, counts, crowded)
        self._executor.forget_threads()
        return found

    def _trials(self, name: str, threads: Sequence[int] = ()) -> list[Trial]:
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

    def _known(self, trial: Trial) -> bool:
        """Whether something was measured, or was to be and took too long."""
        asked = self._forecast.fact(_asked(trial), trial.backend) is not None
        return asked or self._forecast.knows(trial.work)

    def probe(self, name: str, trials: Sequence[Trial], seconds: float, tell: Progress) -> float:
        """Measure for so long, after whatever it takes to start; how long that was."""
        start = perf_counter()
        try:
            self._weights.start(name)
            start = perf_counter()
            if self._forecast.fact(CALL, name) is None:
                self._prober.call(name, self._setup.threads[-1])
            if self._prober.run(trials, start + seconds, tell):
                self._complete(trials)
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

    def _complete(self, trials: Sequence[Trial], rough: float = 0.0) -> None:
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

    def _in_turn(self, names: Sequence[str], threads: int) -> None:
        """Measure beside other programs, one size of everything before the next: nothing is planned of a
        model of which something was never measured."""
        for name in names:  # a device that works by itself has no part in the crowd
            alone = self._backends[name].asynchronous
            mine = self._trials(name, (threads,)) if alone else []
            self.probe(name, mine, PROBE_BUSY_S if alone else 0.0, lambda part: None)
        start = perf_counter()
        groups: dict[tuple[str, int, int, int], list[Trial]] = {}
        for name in names:
            for t in self._trials(name, (threads,)) if name not in self._pool.refused else ():
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
            self._complete([t for t in every if t.backend not in self._pool.refused], HASTY_DOUBT)
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
                self.probe(t.backend, [t], PROBE_BUSY_S, lambda part: None)

    def _compare(self, trials: Sequence[Trial]) -> None:
        try:
            found = compared(self._prober, trials, True, ROUNDS)
        finally:
            for name in {t.backend for t in trials}:
                self._prober.give_back(name)
        for trial, (seconds, _) in zip(trials, found, strict=True):
            self._forecast.learn(trial.work, *trial.size, seconds, HASTY_DOUBT)

    def _learn_turns(self, name: str, most_s: float) -> None:
        """What it costs that this backend and the one that holds most of the model take turns, in passes of
        which some do not take too long."""
        if name == self._home or self._backends[name].asynchronous:
            return
        able, threads, units = self._planner.costs.able, self._setup.threads[-1], self._planner.units
        self._planner.costs.fresh()
        middle, both = len(units) // 2, (name, self._home)
        for tokens in SIZES:
            times = [self._planner.costs.seconds(middle, b, threads, tokens, tokens / 2) for b in both]
            if TURNS * sum(seconds or 0.0 for seconds in times) > most_s:
                return
            price = price_of_a_turn(self._prober, units, able, self._home, name, threads, tokens)
            if price is not None:
                self._forecast.learn_fact(turn(tokens), name, price)

    def _learn_beside(self, name: str) -> None:
        """What the host and weights that cross for a device cost each other."""
        backend, costs = self._backends[name], self._planner.costs
        known = self._forecast.fact(BESIDE, name) is not None
        if known or not backend.asynchronous or self._disturbed():
            return
        able = [name in some and self._home in some for some in costs.able]
        for unit in heaviest(self._planner.units, self._planner.nbytes, self._home):
            crosses = any(backend.streams(use) for use in backend.wants(unit.ops))
            if able[self._planner.units.index(unit)] and crosses:
                threads = self._setup.threads[-1]
                here, there = (
                    Trial("beside", unit.form, (unit.ops,), b, threads, 1) for b in (self._home, name)
                )
                self._forecast.learn_fact(BESIDE, name, self._prober.beside(here, there))
                return


def _asked(trial: Trial) -> str:
    """The fact that a probe had its chance to measure something."""
    return f"asked {trial.form} {trial.threads} {trial.sequences > 1}"
