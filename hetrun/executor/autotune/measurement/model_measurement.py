"""What is measured before the first step, and once more when it is quiet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hetrun.executor.autotune.backend_pool import BackendPool
from hetrun.executor.autotune.measurement.backend_probe import BackendProbe
from hetrun.executor.autotune.measurement.core_choice import heaviest, take_seats
from hetrun.executor.autotune.measurement.crowded_measurement import CrowdedMeasurement
from hetrun.executor.autotune.measurement.prober import Prober
from hetrun.executor.autotune.measurement.survey import by_threads
from hetrun.executor.autotune.tuned_model import TunedModel
from hetrun.executor.autotune.weight_migration import Weights
from hetrun.planner.trials import Trial
from hetrun.system.progress import Progress, stretch

PROBE_S = 8.0  # that a first use may take to measure
LEAST_SHARE = 0.5  # of that, divided by all, for each backend, whatever others have taken
SETTLING = 16  # tokens of the work with which threads are compared


class ModelMeasurement:
    """Measures for one model: each backend by itself on a quiet machine, all in turn beside others."""

    def __init__(self, model: TunedModel, prober: Prober, weights: Weights, pool: BackendPool) -> None:
        self._backends, self._planner = model.backends, model.planner
        self._executor, self._forecast, self._setup = model.executor, model.forecast, model.setup
        self._prober = prober
        self._probe = probe = BackendProbe(model, prober, weights, pool)
        self._crowded = CrowdedMeasurement(model, prober, probe, pool)

    def begin(self, names: Sequence[str], progress: Progress | None) -> Mapping[int, float]:
        """What is not known of these backends, and again what was measured beside others that are gone; what
        the same work takes with each number of threads, where that was tried, because others compute."""
        wanted = [name for name in names if self.unknown(name)]
        take_seats(self._prober, self._planner, self._forecast, self._setup)
        if self._probe.is_disturbed:
            tried = self.threads(crowded=True)
            best = min(tried, key=lambda n: tried[n], default=self._setup.threads[-1])
            self._crowded.measure(wanted, best)
            return tried
        # A command that ends with its answer has no idle moment in which this would be done later.
        if rough := [name for name in names if self._rough([name])]:
            self.refine(rough, progress or (lambda part: None))
        left = PROBE_S
        # What works by itself is quick, and gains most.
        for at, name in enumerate(sorted(wanted, key=lambda n: not self._backends[n].asynchronous)):
            tell = stretch(progress, at / len(wanted), (at + 1) / len(wanted))
            share = max(left / (len(wanted) - at), LEAST_SHARE * PROBE_S / len(wanted))
            left -= self.probe(name, self._probe.trials(name), share, tell)
        if wanted:
            self._executor.forget_threads()
        return {}

    def unknown(self, name: str) -> list[Trial]:
        """What should be measured of a backend: nothing, if it was."""
        trials = self._probe.trials(name)
        known = [self._probe.knows(t) for t in trials]
        return [] if all(known) or self._rough([name]) else trials

    def probe(self, name: str, trials: Sequence[Trial], seconds: float, tell: Progress) -> float:
        """Measure for so long, after whatever it takes to start; how long that was."""
        return self._probe.probe(name, trials, seconds, tell)

    def due(self, names: Sequence[str]) -> bool:
        """Whether something was measured beside other programs, and none computes any more."""
        return self._rough(names) and not self._probe.is_disturbed

    def refine(self, names: Sequence[str], tell: Progress) -> None:
        """Measure it again."""
        for name in names:
            self.probe(name, self._probe.trials(name), PROBE_S / 4 / len(names), tell)
        self._forecast.forget_rough(names)
        self._executor.forget_threads()

    def _rough(self, names: Iterable[str]) -> bool:
        """Whether anything that is known of backends was measured beside other programs."""
        forms = {unit.form for unit in self._planner.units}
        works = [w for w in self._forecast.works() if w.form in forms and w.backend in names]
        return any(self._forecast.rough(work) for work in works)

    def threads(self, crowded: bool) -> Mapping[int, float]:
        """What the same work takes with each number of threads now; empty: there is one number only."""
        counts = self._setup.threads
        if len(counts) < 2:
            return {}
        unit = heaviest(self._planner.units, self._planner.nbytes, self._probe.home)[0]
        trial = Trial("threads", unit.form, (unit.ops,), self._probe.home, counts[-1], SETTLING)
        found = by_threads(self._prober, trial, counts, crowded)
        self._executor.forget_threads()
        return found
