"""Quick comparisons while the machine is as it is: the same work in turn, with more threads and with fewer,
on one backend and on another. What others do meanwhile happens to all that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetrun.executor.autotune.measurement.prober import Prober, Slices
from hetrun.planner.trials import Trial

ROUNDS = 3
SLICE_S = 0.001  # of one round, where no other program computes: one run or a few
# Beside others a thread loses its core for some milliseconds at a time, which a short slice would not see.
CROWDED_SLICE_S = 0.03


def compared(
    prober: Prober, trials: Sequence[Trial], crowded: bool, rounds: int = ROUNDS
) -> list[tuple[float, float]]:
    """What a run of each takes now, and the standard deviation of that, relative."""
    *_, found = in_slices(prober, trials, crowded, rounds)
    return [estimate(times, crowded) for times in found]


def in_slices(prober: Prober, trials: Sequence[Trial], crowded: bool, rounds: int = ROUNDS) -> Slices:
    """The same, slice by slice."""
    return prober.compare(trials, rounds, CROWDED_SLICE_S if crowded else SLICE_S)


def estimate(times: Sequence[float], crowded: bool) -> tuple[float, float]:
    """Others only make work slower, so in quiet the least counts. In a crowd the whole is what passes take:
    no pass of many parts is as lucky as its luckiest part."""
    value = sum(times) / len(times) if crowded else min(times)
    return value, (max(times) - min(times)) / 2 / value / len(times) ** 0.5


def by_threads(prober: Prober, trial: Trial, counts: Sequence[int], crowded: bool) -> Mapping[int, float]:
    """What a run takes with each number of threads."""
    found = compared(prober, [replace(trial, threads=n) for n in counts], crowded)
    return {n: seconds for n, (seconds, _) in zip(counts, found, strict=True)}
