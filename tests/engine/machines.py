"""Machines that are made up, on a clock of their own: what a planner decides on them is worth so many seconds.

A machine has two backends, cores that other programs want too, noise, bursts, parts that become warm, and
first measurements that may be wrong. The real pilot runs the real executor on it, over devices that compute
nothing and let the clock run on. The same requests are then timed by plans that never change, and the best of
these, in hindsight, is what the pilot is measured by: its regret.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from hetrun import LLM
from hetrun.backend import Available, Backend, Descriptor, Pass, Segment, registry
from hetrun.engine.loaded_model import Loaded
from hetrun.executor.executor import Chunk, Step
from hetrun.executor.planned_model import PlannedModel
from hetrun.graph import Graph, Op
from hetrun.graph.signature import units
from hetrun.planner.options import Machine as Counts
from hetrun.planner.plan import bucket_of
from tests.engine.simulated import MODEL, NAMES, Simulated

CORES, CONTEXT, UBATCH = 2, 1024, 512
OP_S, TOKEN_S, CALL_S = 4e-4, 1e-4, 2e-5  # of the first backend with one thread
PROMPTS = (24, 60, 240, 500, 900)
ANSWER = 10  # tokens
REQUESTS = 40
RUN_S = 240.0  # for which programs and bursts are made up; a run that takes longer sees none of them


@dataclass(frozen=True)
class Kind:
    """How a backend works on a machine."""

    op: float  # times what an op takes on the first backend, whatever its size...
    token: float  # ...and each token in it
    ffn: float  # the same once more, of the second half of each layer
    second: float  # what a second thread brings in large passes
    collapse: float  # how much longer two threads take whose cores are wanted by others
    together: float  # times what its parts take one by one, in passes of many
    first: float  # times what it really takes, as long as it is measured for the first time
    warm: float  # how much slower it becomes within minutes


@dataclass(frozen=True)
class Machine:
    """What happens on it."""

    seed: int
    kinds: Mapping[str, Kind]
    noise: float  # mean of what a run takes longer than it must
    programs: Sequence[tuple[float, float, float]]  # from when to when, and how many cores each wants
    bursts: Sequence[tuple[float, float, float]]  # from when to when, and how many times slower all is
    blind: bool  # nobody says what other programs do


def made_up(seed: int) -> Machine:
    """A machine by its number."""
    chance = random.Random(seed)
    kinds = {
        "one": _kind(chance, 1.0, 1.0),
        "two": _kind(chance, 2 ** chance.uniform(-0.5, 2), 2 ** chance.uniform(-2, 1.5)),
    }
    programs = []
    crowd = chance.choice((0, 0, 1, 1, 2, 6))
    for _ in range(crowd):
        begun = chance.choice((-100.0, chance.uniform(0, RUN_S / 2)))
        lasts = chance.choice((1e9, chance.uniform(5, RUN_S / 2)))
        programs.append((begun, begun + lasts, 1.0))
    bursts, at = [], 0.0
    often = chance.choice((1e9, 30.0, 10.0))
    while (at := at + chance.expovariate(1 / often)) < RUN_S:
        bursts.append((at, at + chance.uniform(0.2, 1.5), chance.uniform(2, 6)))
    noise = chance.choice((0.02, 0.05, 0.2))
    return Machine(seed, kinds, noise, programs, bursts, blind=chance.random() < 0.3)


def _kind(chance: random.Random, op: float, token: float) -> Kind:
    return Kind(
        op,
        token,
        2 ** chance.uniform(-0.7, 0.7),
        chance.uniform(0.6, 1.0),
        chance.choice((0.2, 1.0, 8.0)),
        2 ** chance.gauss(0, 0.15),
        2 ** chance.uniform(-2, 2) if chance.random() < 0.4 else 1.0,
        chance.choice((0.0, 0.0, 0.3)),
    )


@dataclass
class World:
    """A machine while it runs; a clock."""

    machine: Machine
    now: float = 1000.0
    began: float = 1e9  # not yet
    threads: int = 1
    spent: float = 0.0  # seconds of our own threads
    chance: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.chance.seed(self.machine.seed)

    def __call__(self) -> float:
        return self.now

    @property
    def at(self) -> float:
        """Seconds since the first request."""
        return self.now - self.began

    def run(self, name: str, segment: Segment, work: Pass) -> None:
        """A segment runs on a backend of it."""
        few = len(work.tokens)
        self.take(name, [(op, work.rows(op.out)) for op in segment.ops], few, self.threads)

    def take(self, name: str, ops: Sequence[tuple[Op, int]], tokens: int, threads: int) -> None:
        """Ops of a segment, each with its rows, in a pass of so many tokens."""
        seconds = self.seconds(name, ops, tokens, threads)
        kind = self.machine.kinds[name]
        seconds *= kind.first if self.at < 0 else 1.0
        seconds *= 1 + self.chance.expovariate(1 / self._noise())
        seconds *= self._burst()
        self.now += seconds
        self.spent += seconds * threads / self._crowding(threads)

    def seconds(self, name: str, ops: Sequence[tuple[Op, int]], tokens: int, threads: int) -> float:
        """The same without chance."""
        kind, total = self.machine.kinds[name], CALL_S
        for op, rows in ops:
            factor = kind.ffn if ".ffn" in op.scope else 1.0
            total += factor * (kind.op * OP_S + kind.token * TOKEN_S * rows)
        if len(ops) > 12:
            total *= kind.together
        if threads > 1:
            total /= 1 + kind.second * (1.0 if tokens > 16 else 0.3)
        total *= 1 + kind.warm * (1 - math.exp(-max(0.0, self.at) / 60))
        crowding = self._crowding(threads)
        return total * crowding * (1 + kind.collapse if threads > 1 and crowding > 1 else 1.0)

    def others(self) -> float:
        """Cores that other programs want."""
        at = max(0.0, self.at)
        return sum(cores for begun, end, cores in self.machine.programs if begun <= at < end)

    def _crowding(self, threads: int) -> float:
        return max(1.0, (self.others() + threads) / CORES)

    def _noise(self) -> float:
        return self.machine.noise * (4 if self.others() else 1)

    def _burst(self) -> float:
        return next((slow for begun, end, slow in self.machine.bursts if begun <= self.at < end), 1.0)


class Others:
    """What the system says that other programs do, in its own time."""

    count = CORES

    def __init__(self, world: World) -> None:
        self._world, self._then = world, world.now

    def look(self, at: float) -> float | None:
        """Cores that others kept busy."""
        if self._world.machine.blind:
            return None
        wanted = self._world.others()
        return min(wanted, CORES * wanted / (wanted + self._world.threads))


@contextmanager
def machine(seed: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A machine, on whose clock everything runs that measures."""
    world = World(made_up(seed))
    for module in (
        "hetrun.executor.executor",
        "hetrun.executor.autotune.autotuner",
        "hetrun.executor.autotune.prober",
        "hetrun.executor.autotune.yielding",
        "hetrun.executor.autotune.weight_migration",
    ):
        monkeypatch.setattr(f"{module}.perf_counter", world)
    monkeypatch.setattr("hetrun.executor.autotune.autotuner.others_running", world.others)
    monkeypatch.setattr("hetrun.executor.autotune.autotuner.Others", lambda: Others(world))
    monkeypatch.setattr("hetrun.executor.planned_model.this_machine", lambda: Counts(CORES, (1, 2), (2,)))
    monkeypatch.setattr("hetrun.executor.planned_model.LEAST_MEASURED", 0)
    made: dict[str, Callable[[], Backend]] = {n: lambda n=n: Simulated(n, world) for n in NAMES}  # type: ignore[misc, arg-type]
    remove = [
        registry.register(Descriptor(n, lambda: Available("a test"), made[n], "a test", preference=200 - i))
        for i, n in enumerate(NAMES)
    ]
    try:
        yield world
    finally:
        for one in remove:
            one()


@dataclass(frozen=True)
class Flight:
    """What a run of the pilot took, and what it did."""

    seconds: float
    changes: Sequence[tuple[float, str]]


def requests(seed: int) -> Sequence[int]:
    """Tokens of each prompt."""
    chance = random.Random(seed + 1)
    return [chance.choice(PROMPTS) for _ in range(REQUESTS)]


def fly(model: Path, world: World) -> tuple[Flight, Graph]:
    """All requests, by the plans that the pilot makes."""

    def steps(loaded: Loaded) -> tuple[Flight, Graph]:
        model = loaded.model
        assert isinstance(model, PlannedModel)
        assert model.pilot is not None
        world.began = world.now
        for prompt in requests(world.machine.seed):
            seq, left = model.alloc(), prompt
            model.expect(prompt)
            while left:
                n = min(left, model.plans.ubatch)
                left -= n
                wanted = np.array([n - 1] if not left else [], np.int64)
                model.step(Step((Chunk(seq, np.full(n, 5), wanted),)))
                model.tend()
            for _ in range(ANSWER):
                model.step(Step((Chunk(seq, np.array([5]), np.array([0])),)))
                model.tend()
            model.free(seq)
        changes = [(c.at - world.began, c.reason) for c in model.pilot.changes]
        return Flight(world.at, changes), model.graph

    with LLM(model, backends=NAMES, ctx=CONTEXT, planner="measured", eager=True) as llm:
        return llm.call(steps)


def hindsight(made: Machine, graph: Graph) -> float:
    """What the best plan takes that never changes: of passes of few tokens and of many, each by itself."""
    every, mixed = dict.fromkeys(NAMES), units(graph)
    plans = [dict.fromkeys((u.scope for u in mixed), name) for name in every]
    plans += [{u.scope: (a if ".ffn" in u.scope else b) for u in mixed} for a, b in (NAMES, NAMES[::-1])]
    found = []
    for threads in (1, 2):
        for few in plans:
            for many in plans:
                found.append(fixed(made, graph, few, many, threads))
    return min(found)


def fixed(made: Machine, graph: Graph, few: Mapping[str, str], many: Mapping[str, str], threads: int) -> float:
    """Seconds of all requests by plans for passes of few tokens and of many."""
    world = World(made)
    world.began = world.now
    cuts = [_cut(graph, few), _cut(graph, many)]
    for prompt in requests(made.seed):
        for n in (*_pieces(prompt), *[1] * ANSWER):
            for name, ops in cuts[bucket_of(n) not in ("1", "2-4", "5-8", "9-16")]:
                rows = [(op, n if op.out.rows == "tokens" else 1) for op in ops]
                world.take(name, rows, n, threads)
    return world.at


def _pieces(prompt: int) -> list[int]:
    return [UBATCH] * (prompt // UBATCH) + ([prompt % UBATCH] if prompt % UBATCH else [])


def _cut(graph: Graph, placed: Mapping[str, str]) -> list[tuple[str, list[Op]]]:
    found: list[tuple[str, list[Op]]] = []
    for unit in units(graph):
        name = placed[unit.scope]
        if not found or found[-1][0] != name:
            found.append((name, []))
        found[-1][1].extend(unit.ops)
    return found


