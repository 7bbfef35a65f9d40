"""What was measured: one record for each segment that ran, and the disk where weights come from there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hetrun.client.events import DeviceSlots, Streaming


@dataclass(frozen=True, slots=True)
class TimeKey:
    """What a time belongs to."""

    segment: str
    backend: str
    bucket: str
    threads: int


@dataclass(slots=True)
class Record:
    """Runs of one segment in one bucket."""

    runs: int = 0
    tokens: int = 0
    seconds: float = 0.0
    smoothed: float = 0.0  # seconds of one run; newer runs count more
    best: float = float("inf")

    def clear(self) -> None:
        """Forget every run."""
        self.runs = self.tokens = 0
        self.seconds = self.smoothed = 0.0
        self.best = float("inf")

    def add(self, tokens: int, seconds: float) -> None:
        """One more run."""
        self.runs += 1
        self.tokens += tokens
        self.seconds += seconds
        self.smoothed = seconds if self.runs == 1 else 0.9 * self.smoothed + 0.1 * seconds
        self.best = min(self.best, seconds)


@dataclass(slots=True)
class RecentPasses:
    """What recent passes of one bucket were like."""

    passes: float = 0.0
    depth: float = 0.0
    seconds: float = 0.0

    def add(self, depth: float) -> None:
        """One more."""
        self.passes += 1
        self.depth += (depth - self.depth) / min(self.passes, 20)


class Stats:
    """All records; written by the engine thread only."""

    def __init__(self) -> None:
        self._records: defaultdict[TimeKey, Record] = defaultdict(Record)
        self.native_seconds = 0.0  # inside calls that leave Python
        self.step_seconds = 0.0  # steps of the engine from end to end
        self.wait_seconds = 0.0  # of the engine's thread, for those that work by themselves
        self.steps = 0
        self.segments = 0  # that have begun, ever: a step in which one begins gets on
        self.compiling_seconds = 0.0  # of steps, for passes of shapes that were not compiled, or not any more
        self.accepted = 0  # guesses of tokens that were right
        self.streaming: Streaming | None = None  # None: all weights are in memory
        self.device_slots: DeviceSlots | None = None  # None: no experts have slots on a device

    def record(self, key: TimeKey) -> Record:
        """Where the runs of a segment are counted; it stays the same for ever."""
        return self._records[key]

    def step(self, seconds: float, native: float) -> None:
        """One step of the engine, scheduling and sampling included, and its time outside Python."""
        self.step_seconds += seconds
        self.native_seconds += native
        self.steps += 1

    def __iter__(self) -> Iterator[tuple[TimeKey, Record]]:
        return iter([(key, record) for key, record in self._records.items() if record.runs])

    @property
    def python_share(self) -> float:
        """The part of the steps' time that was spent in Python."""
        return 1 - self.native_seconds / self.step_seconds if self.step_seconds else 0.0

    def reset(self) -> None:
        """Forget everything."""
        for record in self._records.values():
            record.clear()
        self.native_seconds = self.step_seconds = self.wait_seconds = 0.0
        self.steps = 0
