"""What passes of a model took whose weights come from disk in part, kept for plans of the next start.

Times of single ops do not tell that: the threads that compute also unpack what the disk brings. What stays in
memory changes it, so each tenth of the weights has times of its own; where there are none, those of the
nearest are the best guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hetrun.config import dirs
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.rates import Basis

TENTHS = 10
FEW = 4  # tokens that a pass takes along for almost nothing
FACTS = ("least", "each", "off", "found", "rate")  # of `PassTimes`, in its order
MOST_OFF = 4.0  # passes that took longer than this, against what disk and computing take, were disturbed


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Passes as the last runs saw them."""

    least_s: float  # of computing, for a token
    each_s: float  # that each token of a prompt adds
    off: float  # how much longer a token took than the longer of reading and computing
    found: float = 0.0  # of the experts that tokens choose, the share that was in memory
    rate: float = 0.0  # bytes a second that the disk gave them; 0: not known
    exact: bool = True  # seen with about as much in memory

    def seconds(self, tokens: int, nbytes: float, rate: float) -> float:
        """A pass of `tokens` that reads `nbytes`; at `rate` if no pass has shown the disk's."""
        reading_s = nbytes / (self.rate or rate)
        return self.off * max(self.least_s + (self.each_s * tokens if tokens > FEW else 0.0), reading_s)


class Passes:
    """What is kept of one model's passes; the file is read once."""

    def __init__(self, key: str, memory: Path | None = None) -> None:
        self.key = key
        self._kept = WorkTimes.load(memory or path_of_passes())

    def at(self, kept: float) -> PassTimes | None:
        """With this share of the weights in memory, or the nearest; None: the model has not run here."""
        for tenth in _nearest(_tenth(kept)):
            facts = [self._kept.fact(_name(name, tenth), self.key) for name in FACTS]
            least, each, off, found, rate = facts
            if least is not None and off is not None:
                return PassTimes(least, each or 0.0, off, found or 0.0, rate or 0.0, tenth == _tenth(kept))
        return None


def basis_of(times: PassTimes | None) -> Basis:
    """What speeds rest on that follow from these passes."""
    return "measured" if times and times.exact else "predicted"


def learn(key: str, kept: float, times: PassTimes, memory: Path | None = None) -> None:
    """Keep what a run has seen."""
    path = memory or path_of_passes()
    forecast, tenth = WorkTimes.load(path), _tenth(kept)
    values = (times.least_s, times.each_s, times.off, times.found, times.rate)
    for name, value in zip(FACTS, values, strict=True):
        if value > 0:
            forecast.learn_fact(_name(name, tenth), key, value)
    forecast.save(path)


def path_of_passes() -> Path:
    """Where it is kept what passes take."""
    return dirs().cache / "times" / "passes.json"


def _tenth(kept: float) -> int:
    return min(TENTHS, max(0, round(TENTHS * kept)))


def _nearest(tenth: int) -> Iterator[int]:
    yield from sorted(range(TENTHS + 1), key=lambda other: abs(other - tenth))


def _name(what: str, tenth: int) -> str:
    return f"pass {what} {tenth}/{TENTHS}"
