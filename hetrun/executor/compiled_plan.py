"""What a plan became for passes of one shape, and what such a pass took."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from hetrun.backend import Pass, Runner
from hetrun.executor.stats import Record
from hetrun.planner.costmodel import WorkCells


@dataclass(slots=True)
class PassTiming:
    """A pass that ran: how long it took, and what there is to learn from it."""

    bucket: str
    threads: int
    tokens: int
    depth: float
    several: bool  # sequences
    seconds: float
    warm: bool  # nothing of it ran for the first time
    times: list[tuple[WorkCells, int, float, float]]  # of its segments: tokens, depth, seconds

    def learn(self) -> None:
        """From now on the forecast knows."""
        for measured, tokens, depth, seconds in self.times:
            measured.add(tokens, depth, seconds)


@dataclass(slots=True)
class TimedRunner:
    """A runner, and where its times go."""

    name: str  # the segment's and its backend's
    backend: str
    record: Record
    measured: WorkCells | None
    runner: Runner
    of_wanted: bool  # wanted rows are what its times depend on
    reads_states: frozenset[int] = frozenset()  # of these layers, on the host
    reads_rows: frozenset[int] = frozenset()  # the same of keys and values
    warm: bool = False

    def add(self, work: Pass, ran: PassTiming, seconds: float) -> None:
        """It ran. The first run touches memory for the first time, and says nothing of the next ones."""
        self.record.add(ran.tokens, seconds)
        if not self.warm:
            self.warm, ran.warm = True, False
        elif self.measured:
            if not self.of_wanted:
                ran.times.append((self.measured, ran.tokens, ran.depth, seconds))
            elif len(work.wanted):
                ran.times.append((self.measured, len(work.wanted), 1.0, seconds))


Stage = Sequence[TimedRunner]


@dataclass(frozen=True, slots=True)
class CompiledPass:
    """The runners of a plan for one shape of pass."""

    plan: object  # the stages they were made from, kept so that nothing else gets their id
    stages: list[list[TimedRunner]]

    def close(self) -> None:
        """Give their memory back: of all of them, also where one fails."""
        with ExitStack() as ends:
            for stage in self.stages:
                for timed in stage:
                    ends.callback(timed.runner.close)
