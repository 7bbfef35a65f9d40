"""Host and link read the same memory: what that costs is measured once, and predictions know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from hetrun.backend import Backend, Buffers, Done, Pass, PassShape, Runner, Segment
from hetrun.executor.autotune.measurement import prober as probing
from hetrun.executor.autotune.measurement.prober import Prober
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import kv_shapes
from hetrun.graph.quant import by_name
from hetrun.graph.signature import units
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.plan import BUCKETS, Placement, make_plans
from hetrun.planner.trials import BESIDE, Trial
from hetrun.planner.two_device.cost import PassSetting
from tests.planner.test_two_device_planner import (
    BUCKET,
    CPU,
    FAR,
    GPU,
    GRAPH,
    HOST,
    measured,
    now,
    on_the_host,
    planner,
    same,
    sides_of,
    without,
)
from tests.support.nulldevice import NullDevice

RUN_S, CROSSING_S = 0.01, 0.08


@dataclass
class Clock:
    """Of both sides: the other one's work goes on while the host runs."""

    slower: float  # how many times as long both take at once
    now: float = 0.0
    free: float = 0.0  # when the link is
    there: bool = False  # weights have crossed and were not evicted

    def __call__(self) -> float:
        return self.now

    def run(self) -> None:
        if self.free > self.now:
            self.free += RUN_S * (self.slower - 1)
            self.now += RUN_S * self.slower
        else:
            self.now += RUN_S

    def cross(self) -> None:
        self.free = self.now + (0.0 if self.there else CROSSING_S)
        self.there = True


@dataclass
class Run:
    """A segment on one side."""

    submitted: Callable[[], None]
    clock: Clock
    waits: bool

    def submit(self, work: Pass) -> Done:
        self.submitted()
        return self

    def wait(self) -> None:
        if self.waits:
            self.clock.now = max(self.clock.now, self.clock.free)

    def close(self) -> None:
        pass


class Side(NullDevice):
    """The host, or a device with weights that cross."""

    def __init__(self, name: str, clock: Clock) -> None:
        super().__init__(name)
        self.clock, self.asynchronous = clock, name == FAR

    def evict_streamed(self) -> None:
        self.clock.there = False

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        clock = self.clock
        return Run(clock.cross if self.name == FAR else clock.run, clock, self.name == FAR)


@pytest.mark.parametrize("slower", [1.0, 1.4, 2.0])
def test_a_pair_at_once_tells_what_both_cost_each_other(
    slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(slower)
    monkeypatch.setattr(probing, "perf_counter", clock)
    backends: dict[str, Backend] = {name: Side(name, clock) for name in (HOST, FAR)}
    kv = KvCache(kv_shapes(GRAPH), by_name("F16"), 64, 2, 64)
    probe = Prober(GRAPH, backends, WeightStore(backends), kv, WorkTimes(), 64)
    unit = next(u for u in units(GRAPH) if u.scope == "blk.0.ffn")
    here, there = (Trial("a test", unit.form, (unit.ops,), name, 1, 1) for name in (HOST, FAR))
    assert probe.beside(here, there) == pytest.approx(slower)
    assert kv.used_bytes == 0


def test_passes_in_which_both_are_busy_are_predicted_with_that() -> None:
    """By so much of the time of whatever is busy less; passes of many tokens wait for cores."""
    patch = without("_shared")
    decide = planner(measured(CPU, same(1e-6), GPU))
    proposal = decide.propose(on_the_host(), now())
    patch.undo()
    assert proposal is not None
    plan = proposal.plans.plans["1"]
    before = decide.sides.clock(plan, PassSetting(1, 1.0, 1))
    many = decide.pass_seconds(proposal.plans.plans[BUCKET], 512, 256.0)
    decide._forecast.learn_fact(BESIDE, FAR, 1.5)
    after = decide.sides.clock(plan, PassSetting(1, 1.0, 1))
    assert before
    assert after
    # Balanced: what crosses takes about as long as what the host does.
    assert 1.3 * before.seconds < after.seconds <= 1.5 * before.seconds
    shorter = {name: after.segments[name] / seconds for name, seconds in before.segments.items()}
    assert list(shorter.values()) == pytest.approx([after.seconds / before.seconds] * len(shorter))
    assert decide.pass_seconds(proposal.plans.plans[BUCKET], 512, 256.0) == many
    host = make_plans(GRAPH, dict.fromkeys(BUCKETS, (1, (Placement("", HOST, ""),))))["1"]
    alone = decide.sides.clock(host, PassSetting(1, 1.0, 1))
    assert alone
    assert alone.seconds == pytest.approx(sum(CPU.values()) * 2 + 1.0)


def test_where_both_wait_for_the_same_memory_nothing_is_gained_by_both() -> None:
    patch = without("_shared")
    found = []
    for beside in (1.0, 2.0):
        times = measured(CPU, same(1e-6), GPU)
        times.learn_fact(BESIDE, FAR, beside)
        proposal = planner(times).propose(on_the_host(), now())
        plans = proposal.plans if proposal else on_the_host()
        found.append(set(sides_of(plans.plans["1"], 0).values()))
    patch.undo()
    assert found == [{HOST, FAR}, {HOST}]
