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
from hetrun.planner.costmodel import Forecast

TENTHS = 10
MOST_OFF = 4.0  # passes that took longer than this, against what disk and computing take, were disturbed


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Passes as the last runs saw them."""

    least_s: float  # of computing, for a token
    each_s: float  # that each token of a prompt adds
    off: float  # how much longer a token took than the longer of reading and computing
    found: float = 0.0  # of the experts that tokens choose, the share that was in memory
    exact: bool = True  # seen with about as much in memory

    def seconds(self, tokens: int, reading_s: float) -> float:
        """A pass of so many tokens, which reads for so long."""
        return self.off * max(self.least_s + (self.each_s * tokens if tokens > 1 else 0.0), reading_s)


def known(key: str, kept: float, memory: Path | None = None) -> PassTimes | None:
    """Passes of a model with such a share of its weights in memory; None: it has not run here."""
    forecast = Forecast.load(memory or path_of_passes())
    for tenth in _nearest(_tenth(kept)):
        facts = [forecast.fact(_name(name, tenth), key) for name in ("least", "each", "off", "found")]
        if facts[0] is not None and facts[2] is not None:
            return PassTimes(facts[0], facts[1] or 0.0, facts[2], facts[3] or 0.0, tenth == _tenth(kept))
    return None


def learn(key: str, kept: float, times: PassTimes, memory: Path | None = None) -> None:
    """Keep what a run has seen."""
    path = memory or path_of_passes()
    forecast, tenth = Forecast.load(path), _tenth(kept)
    facts = {"least": times.least_s, "each": times.each_s, "off": times.off, "found": times.found}
    for name, value in facts.items():
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
