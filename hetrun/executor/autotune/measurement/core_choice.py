"""Which cores each number of threads runs on, if there is a choice: measured once, on the model's weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hetrun.executor.autotune.measurement.prober import Prober
from hetrun.executor.autotune.setup import Setup
from hetrun.graph.signature import Unit
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.online import OnlinePlanner
from hetrun.planner.residency import Copy
from hetrun.planner.trials import HOME_SAMPLES, Trial
from hetrun.system.core_sets import CoreSet
from hetrun.system.thread_affinity import chosen

WORTH = 0.97  # a set must be so much faster than leaving threads to the system, which knows what else runs


def take_seats(prober: Prober, planner: OnlinePlanner, forecast: WorkTimes, setup: Setup) -> None:
    """Run some layers, a token at a time, with their threads on each set in turn, and stay on the best.

    What was measured before is known. On most small machines there is nothing to choose.
    """
    seats, home = chosen(), _home(setup)
    units = heaviest(planner.units, planner.nbytes, home)
    for n in setup.threads:
        for cores in seats.open(n):
            if forecast.fact(_asked(cores), home) is not None:
                continue
            seats.choose(cores)
            ops = tuple(u.ops for u in units[:HOME_SAMPLES])
            took: list[float] = []
            prober.measure(Trial("seats", units[0].form, ops, home, n, 1), took.append)
            forecast.learn_fact(_asked(cores), home, took[0])
    recall_seats(forecast, setup)


def recall_seats(forecast: WorkTimes, setup: Setup) -> None:
    """Take the seats that were measured before."""
    seats, home = chosen(), _home(setup)
    for n in setup.threads:
        times = [(cores, forecast.fact(_asked(cores), home)) for cores in seats.open(n)]
        known = [(cores, seconds) for cores, seconds in times if seconds is not None]
        if known and len(known) == len(times):
            anywhere, best = known[0], min(known, key=lambda row: row[1])
            seats.choose(best[0] if best[1] < WORTH * anywhere[1] else anywhere[0])


def heaviest(units: Sequence[Unit], nbytes: Mapping[Copy, int], backend: str) -> list[Unit]:
    """The units of the form that has most of the weights: what a step of one token mostly waits for."""
    totals: dict[str, int] = {}
    for i, unit in enumerate(units):
        totals[unit.form] = totals.get(unit.form, 0) + nbytes.get((i, backend), 0)
    form = max(totals, key=lambda form: totals[form])
    return [unit for unit in units if unit.form == form]


def _home(setup: Setup) -> str:
    """The backend that holds most of the model."""
    return Counter(setup.home.values()).most_common(1)[0][0]


def _asked(cores: CoreSet) -> str:
    return f"seats {cores.threads} {cores.name}"
