"""Devices on a clock of the test's own: they compute nothing, and let it run on by what a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from hetrun.backend import (
    Available,
    Backend,
    Buffers,
    Descriptor,
    Done,
    Pass,
    PassShape,
    Runner,
    Segment,
    registry,
)
from hetrun.memory.kv.cache import KvCache
from tests.models.tiny import TinyLlama
from tests.support.nulldevice import NullDevice

MODEL = TinyLlama("piloted", layers=2, context=1024)
OP_S, TOKEN_S, CALL_S = 4e-4, 1e-4, 2e-5  # what an op, each token in it, and a segment take
NAMES = ("one", "two")

Speed = Callable[[float, str, Segment], float]  # seconds since the test began, backend, work -> a factor


@dataclass
class Clock:
    """Runs on when a device computes."""

    now: float = 1000.0
    began: float = 1e9  # not yet
    speed: Speed = lambda at, name, segment: 1.0
    threads: int = 1  # of passes now

    def __call__(self) -> float:
        return self.now

    def run(self, name: str, segment: Segment, work: Pass) -> float:
        """When a segment is done."""
        seconds = CALL_S + sum(OP_S + TOKEN_S * work.rows(op.out) for op in segment.ops)
        self.now += seconds * self.speed(max(0.0, self.now - self.began), name, segment)
        return self.now


class Simulated(NullDevice):
    """Takes time on the clock, and gives zeros."""

    def __init__(self, name: str, clock: Clock) -> None:
        super().__init__(name)
        self.clock = clock

    def set_threads(self, threads: int) -> None:
        self.clock.threads = threads

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        return Run(self, segment)


@dataclass
class Run:
    """One segment; done when it is submitted."""

    device: Simulated
    segment: Segment
    end: float = 0.0

    def submit(self, work: Pass) -> Done:
        for value in self.segment.writes:
            work.values[value.name] = np.zeros((work.rows(value), value.width), np.float32)
        self.end = self.device.clock.run(self.device.name, self.segment, work)
        return self

    def wait(self) -> None:
        self.device.clock.now = max(self.device.clock.now, self.end)

    def close(self) -> None:
        pass


@contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Two backends on one clock, which everything reads that measures; the first is where weights lie."""
    clock = Clock()
    for module in (
        "hetrun.executor.executor",
        "hetrun.executor.autotune.active_plan",
        "hetrun.executor.autotune.autotuner",
        "hetrun.executor.autotune.measuring",
        "hetrun.executor.autotune.prober",
    ):
        monkeypatch.setattr(f"{module}.perf_counter", clock)
    monkeypatch.setattr("hetrun.executor.autotune.measuring.others_running", lambda: 0.0)
    # Passes are long here, so that a few are many seconds.
    monkeypatch.setattr("hetrun.executor.autotune.measuring.PROBE_S", 1e4)
    monkeypatch.setattr("hetrun.executor.planned_model.LEAST_MEASURED", 0)
    made: dict[str, Callable[[], Backend]] = {n: lambda n=n: Simulated(n, clock) for n in NAMES}  # type: ignore[misc]
    remove = [
        registry.register(Descriptor(n, lambda: Available("a test"), made[n], "a test", preference=200 - i))
        for i, n in enumerate(NAMES)
    ]
    try:
        yield clock
    finally:
        for one in remove:
            one()
