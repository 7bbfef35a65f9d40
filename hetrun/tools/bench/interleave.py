"""Which side runs when: A B B A, so that a machine that gets slower or faster favours neither."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from hetrun.tools.bench.cases import BenchCase

# Worker threads of the side that ran last spin for some milliseconds before they sleep.
PAUSE_S = 0.1


# Called with what runs, before (False) and after (True) each sample, and before what is not measured.
Tick = Callable[[str, bool], None]


class BenchSide(Protocol):
    """Something that can be measured."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def prepare(self, case: BenchCase) -> None:
        """Warm up; nothing of it counts."""
        ...

    def sample(self, case: BenchCase, seed: int) -> float:
        """Tokens per second, once."""
        ...


@dataclass(frozen=True, slots=True)
class UndisturbedSide:
    """A side that runs while the other one's engine does nothing: else it may compare plans."""

    side: BenchSide
    alone: Callable[[Callable[[], float]], float]

    @property
    def name(self) -> str:
        """For people."""
        return self.side.name

    def prepare(self, case: BenchCase) -> None:
        """Warm up."""

        def work() -> float:
            self.side.prepare(case)
            return 0.0

        self.alone(work)

    def sample(self, case: BenchCase, seed: int) -> float:
        """Tokens per second, once."""
        return self.alone(lambda: self.side.sample(case, seed))


@dataclass(frozen=True, slots=True)
class Duel:
    """Samples of both sides, pair by pair."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        """The median of what each pair says: neighbours in time saw the same machine."""
        if not self.theirs:
            return None
        return median(a / b for a, b in zip(self.ours, self.theirs, strict=True))


def measure(case: BenchCase, rounds: int, ours: BenchSide, theirs: BenchSide | None, tick: Tick) -> Duel:
    """Both sides in turn, a pair in each round."""
    sides = [ours] if theirs is None else [ours, theirs]
    for side in sides:
        tick(f"{side.name} warms up", False)
        side.prepare(case)
    samples: list[list[float]] = [[] for _ in sides]
    for n in range(rounds):
        order = list(enumerate(sides))
        for i, side in order if n % 2 == 0 else reversed(order):
            tick(side.name, False)
            time.sleep(PAUSE_S)
            samples[i].append(side.sample(case, n + 1))
            tick(side.name, True)
    return Duel(*map(tuple, samples))
