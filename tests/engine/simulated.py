"""Devices on a clock of the test's own: they compute nothing, and let it run on by what a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

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


class Timed(Protocol):
    """What lets a clock run on by what work takes."""

    now: float
    threads: int

    def run(self, name: str, segment: Segment, work: Pass) -> float:
        """When a segment is done that begins now."""


class Simulated(NullDevice):
    """Takes time on the clock, and gives zeros."""

    def __init__(self, name: str, clock: Timed) -> None:
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


MEASURING = (
    "active_plan",
    "autotuner",
    "measurement.backend_probe",
    "comparison_scheduler",
    "crowd_watch",
    "measurement.crowded_measurement",
    "measurement.prober",
    "residency_tuner",
    "state",
    "thread_trials",
    "weight_migration",
    "yield_point",
)


@contextmanager
def on(
    clock: Callable[[], float], made: Mapping[str, Callable[[], Backend]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Backends on a clock, which everything reads that measures; the first is where weights lie."""
    for module in ("executor", *(f"autotune.{name}" for name in MEASURING)):
        monkeypatch.setattr(f"hetrun.executor.{module}.perf_counter", clock)
    monkeypatch.setattr("hetrun.executor.tuning_setup.LEAST_MEASURED", 0)
    with ExitStack() as registered:
        for i, (name, make) in enumerate(made.items()):
            one = Descriptor(name, lambda: Available("a test"), make, "a test", preference=200 - i)
            registered.callback(registry.register(one))
        yield


@contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Two backends on one clock."""
    clock = Clock()
    monkeypatch.setattr("hetrun.executor.autotune.measurement.backend_probe.others_running", lambda: 0.0)
    # Passes are long here, so that a few are many seconds.
    monkeypatch.setattr("hetrun.executor.autotune.measurement.model_measurement.PROBE_S", 1e4)
    with on(clock, {name: partial(Simulated, name, clock) for name in NAMES}, monkeypatch):
        yield clock
