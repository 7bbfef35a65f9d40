"""Made-up machines with a clock of their own: what a planner decides there is measured in seconds.

A machine has two backends, cores that other programs want too, noise, bursts, parts that become warm, and
first measurements that may be wrong. The real autotuner runs the real executor on it, over devices that
compute nothing and let the clock run on. The same requests are then timed by plans that never change, and the
best of these, in hindsight, is what the autotuner is measured by: its regret.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from hetrun.api.local_model import LocalModel
from hetrun.backend import FLOAT_BYTES, Pass, Segment, WeightUse
from hetrun.engine.loaded_model import LoadedModel
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.graph import Graph, Op
from hetrun.graph.signature import units
from hetrun.planner.options import PlannerMachine as Counts
from hetrun.planner.plan import bucket_of
from hetrun.tools.simulate.machine import SimulatedDevice as Described, sides
from hetrun.tools.simulate.machine_files import open_machine
from tests.engine import simulated
from tests.engine.simulated import NAMES, Simulated
from tests.models.tiny import TinyLlama

CORES, CONTEXT, UBATCH = 2, 1024, 512
DEVICE = "device"
CROSSING_S = 2e-6  # of a token whose values cross to a device, or back
MODEL = TinyLlama("made_up", layers=6, context=1024)
FILLED, BITS, WIDTH = 0.8, 4.5, 8192  # of a GPU's memory, by a model with such weights and such a width
OPS = 95  # of the graph here, which stands for it
OP_S, TOKEN_S, CALL_S = 1.5e-4, 4e-5, 1e-5  # of the first backend with one thread
PROMPTS = (24, 60, 240, 500, 900)
ANSWER = 10  # tokens
HELD_UP_S = 0.02  # at a time
TICK_S = 1e-9  # no two changes are closer
REQUESTS = 100
READING_S = 1.0  # between two of them, and no part of what they take
RUN_S = 600.0  # for which programs and bursts are made up; a run that takes longer sees none of them

Placed = Mapping[str, str]  # a backend for each unit


@dataclass(frozen=True)
class Kind:
    """How a backend works on a machine."""

    op: float  # times what an op takes on the first backend, whatever its size...
    token: float  # ...and each token in it
    ffn: float  # the same once more, of the second half of each layer
    second: float  # what a second thread brings in large passes
    collapse: float  # how much longer two threads take whose cores are wanted by others
    together: float  # times what its parts take one by one, in passes
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
    names: Sequence[str]  # of the backends; with a device that works by itself a third one
    blind: bool  # what other programs do is not known
    crossing: float = CROSSING_S


def made_up(seed: int) -> Machine:
    """A machine by its number; every fifth has a device that works by itself."""
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
    blind, names = chance.random() < 0.3, tuple[str, ...](NAMES)
    if seed % 5 == 4:
        names = (*NAMES, DEVICE)
        kinds[DEVICE] = _kind(chance, 2 ** chance.uniform(-1, 2), 2 ** chance.uniform(-4, 1))
    return Machine(seed, kinds, noise, programs, bursts, names, blind)


def of_file(named: str, seed: int) -> Machine:
    """A machine that `hetrun plan --machine` knows, on which happens what a number says: its processor and
    its GPU take the times of a model that fills most of the GPU."""
    made, (cpu, gpu, link) = made_up(seed), sides(open_machine(named))
    chance = random.Random(seed)
    nbytes = FILLED * gpu.memory / OPS

    def kind(device: Described, base: Kind, threads: float) -> Kind:
        """`threads`: how many times faster several are than the one that counts here."""
        op = nbytes / device.bandwidth + device.launch
        token = 2 * nbytes * 8 / BITS / device.rate(UBATCH, True)
        return replace(base, op=op * threads**0.4 / OP_S, token=token * threads / TOKEN_S, together=1.0)

    kinds = {
        "one": kind(cpu, _kind(chance, 1.0, 1.0), CORES),
        "two": kind(cpu, _kind(chance, 1.0, 1.0), CORES * chance.uniform(0.7, 1.5)),
        DEVICE: kind(gpu, _kind(chance, 1.0, 1.0), 1.0),
    }
    crossing = WIDTH * FLOAT_BYTES / link.bandwidth + link.latency / UBATCH
    return replace(made, kinds=kinds, names=(*NAMES, DEVICE), crossing=crossing)


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
    chance: random.Random = field(default_factory=random.Random)
    known: dict[tuple[str, int, str, int, int], float] = field(default_factory=dict)
    crowds: tuple[float, float, float] = (1.0, 0.0, 0.0)  # from when to when, and the cores they want
    free: float = 0.0  # when the device that works by itself is done
    stands: float | None = None  # the moment of the machine's day at which it stands still
    luck: float | None = None  # of the pass that runs; None: it is none that anybody waits for
    edges: Sequence[float] = ()  # of programs and bursts

    def __post_init__(self) -> None:
        self.chance.seed(self.machine.seed)
        happens = (*self.machine.programs, *self.machine.bursts)
        self.edges = sorted({x for begun, end, _ in happens for x in (begun, end)})

    def __call__(self) -> float:
        return self.now

    @property
    def at(self) -> float:
        """Seconds since the first request. While an answer is read, nothing else happens."""
        return self.now - self.began if self.stands is None else self.stands

    def run(self, name: str, segment: Segment, work: Pass) -> float:
        """A segment runs on a backend of it; when that is over."""
        ops = [(op, work.rows(op.out)) for op in segment.ops]
        if name == DEVICE:
            self.free = max(self.now, self.free) + self._takes(name, ops, len(work.tokens), 1)
            return self.free
        self.take(name, ops, len(work.tokens), self.threads)
        return self.now

    def take(self, name: str, ops: Sequence[tuple[Op, int]], tokens: int, threads: int) -> None:
        """Ops of a segment, each with its rows, in a pass of this many tokens; the pass waits for that."""
        self.now += self._takes(name, ops, tokens, threads)

    def _takes(self, name: str, ops: Sequence[tuple[Op, int]], tokens: int, threads: int) -> float:
        kind, threads = self.machine.kinds[name], 0 if name == DEVICE else threads
        seconds = self.alone(name, ops, tokens, threads)
        seconds *= kind.first if self.at < 0 else 1.0
        unlucky = self.chance.expovariate(1) if self.luck is None else self.luck
        # Others hold up for milliseconds at a time: a long run has its share of that, a short one may not.
        unlucky = 1 + (unlucky - 1) / math.sqrt(max(1.0, seconds / HELD_UP_S))
        seconds *= 1 + self._noise() * unlucky
        seconds *= 1 if self.luck is None else kind.together
        return self._beside_others(kind, seconds, threads)

    def _beside_others(self, kind: Kind, seconds: float, threads: int) -> float:
        """How long work takes that takes `seconds` alone: each part of it as the machine is by then."""
        at, took = self.at, 0.0
        while seconds:
            slower = self._slower(kind, at + took, threads)
            until = max(took + TICK_S, self._next_change(at + took) - at) if self.stands is None else math.inf
            part = min(seconds, (until - took) / slower)
            took = took + part * slower if part == seconds else until
            seconds -= part
        return took

    def _slower(self, kind: Kind, at: float, threads: int) -> float:
        """How many times longer work takes at some moment, for what else happens. A device that works
        by itself has no threads, and shares no cores."""
        crowding = max(1.0, (self._others_at(max(0.0, at)) + threads) / CORES) if threads else 1.0
        collapse = 1 + kind.collapse if threads > 1 and crowding > 1 else 1.0
        return crowding * collapse * self._burst(at)

    def alone(self, name: str, ops: Sequence[tuple[Op, int]], tokens: int, threads: int) -> float:
        """The same without chance, where nothing else runs."""
        kind = self.machine.kinds[name]
        key = name, len(ops), ops[0][0].scope, ops[0][1], ops[-1][1]
        total = self.known.get(key)
        if total is None:
            total = self.known[key] = CALL_S + sum(
                (kind.ffn if ".ffn" in op.scope else 1.0) * (kind.op * OP_S + kind.token * TOKEN_S * rows)
                for op, rows in ops
            )
        if threads > 1:
            total /= 1 + kind.second * (1.0 if tokens > 16 else 0.3)
        if name == DEVICE:
            return total + 2 * self.machine.crossing * tokens
        return total * (1 + kind.warm * (1 - math.exp(-max(0.0, self.at) / 60)))

    def others(self) -> float:
        """Cores that other programs want."""
        return self._others_at(max(0.0, self.at))

    def _others_at(self, at: float) -> float:
        found = self.crowds
        if not found[0] <= at < found[1]:
            edges = sorted({x for begun, end, _ in self.machine.programs for x in (begun, end)})
            i = bisect(edges, at)
            cores = sum(n for begun, end, n in self.machine.programs if begun <= at < end)
            self.crowds = found = (edges[i - 1] if i else -1e18, edges[i] if i < len(edges) else 1e18, cores)
        return found[2]

    def _noise(self) -> float:
        return self.machine.noise * (4 if self.others() else 1)

    def _burst(self, at: float) -> float:
        i = bisect(self.machine.bursts, (at, 1e18))
        begun, end, slow = self.machine.bursts[i - 1] if i else (0.0, 0.0, 1.0)
        return slow if begun <= at < end else 1.0

    def _next_change(self, at: float) -> float:
        """When a program or a burst begins or ends the next time."""
        i = bisect(self.edges, at)
        return self.edges[i] if i < len(self.edges) else math.inf


class Device(Simulated):
    """Works by itself, on memory of its own."""

    asynchronous = True

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return 0

    def device_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return sum(use.weight.nbytes for use in wanted)

    def set_threads(self, threads: int) -> None:
        """Its own do not count."""


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
def machine(made: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A machine, on whose clock everything runs that measures."""
    world = World(made)
    monkeypatch.setattr("hetrun.executor.autotune.measurement.backend_probe.others_running", world.others)
    monkeypatch.setattr("hetrun.executor.autotune.autotuner.OtherPrograms", lambda: Others(world))
    monkeypatch.setattr("hetrun.executor.tuning_setup.this_machine", lambda: Counts(CORES, (1, 2), (2,)))
    kinds = {name: Device if name == DEVICE else Simulated for name in world.machine.names}
    with simulated.on(world, {name: partial(kind, name, world) for name, kind in kinds.items()}, monkeypatch):
        yield world


@dataclass(frozen=True)
class Flight:
    """What a run of the autotuner took, and what it did."""

    seconds: float
    changes: Sequence[tuple[float, str]]


def requests(seed: int) -> Sequence[int]:
    """Tokens of each prompt."""
    chance = random.Random(seed + 1)
    return [chance.choice(PROMPTS) for _ in range(REQUESTS)]


def luck(seed: int) -> Iterator[float]:
    """How unlucky each pass is: the same ones, whatever it runs by."""
    chance = random.Random(seed + 2)
    while True:
        yield chance.expovariate(1)


def fly(
    model: Path, world: World, look: Callable[[PlannedModel], object] | None = None
) -> tuple[Flight, Graph]:
    """All requests, by the plans that the autotuner makes."""

    def steps(loaded: LoadedModel) -> tuple[Flight, Graph]:
        model = loaded.model
        assert isinstance(model, PlannedModel)
        assert model.autotuner is not None
        world.began, lucks = world.now, luck(world.machine.seed)

        def step(seq: int, n: int, last: bool) -> None:
            world.luck = next(lucks)
            model.step(Step((Chunk(seq, np.full(n, 5), np.array([n - 1] if last else [], np.int64)),)))
            world.luck = None
            model.tend()

        def idle(model: PlannedModel) -> None:
            """The user reads the answer; what takes longer than that holds up the next request."""
            end, world.stands = world.now + READING_S, world.at
            while world.now < end:
                model.tend(idle=True)
                world.now = max(world.now, min(world.now + 0.25, end))
            world.began, world.stands = world.began + READING_S, None

        for prompt in requests(world.machine.seed):
            seq, left = model.alloc(), prompt
            model.expect(prompt)
            while left:
                n = min(left, model.plans.ubatch)
                left -= n
                step(seq, n, not left)
            for _ in range(ANSWER):
                step(seq, 1, True)
            model.free(seq)
            idle(model)
        seconds = world.at
        if look:
            look(model)
        changes = [(c.at - world.began, c.reason) for c in model.autotuner.changes]
        return Flight(seconds, changes), model.graph

    with LocalModel(model, backends=world.machine.names, ctx=CONTEXT, planner="measured", eager=True) as llm:
        return llm.call(steps)


def hindsight(made: Machine, graph: Graph) -> float:
    """What the best plan takes that never changes: of passes of few tokens and of many, each by itself."""
    mixed = [u.scope for u in units(graph)]
    plans = [dict.fromkeys(mixed, name) for name in made.names]
    plans += [{u: (a if ".ffn" in u else b) for u in mixed} for a, b in permutations(made.names, 2)]
    return min(_with_threads(made, graph, plans, n) for n in (1, 2))


def _with_threads(made: Machine, graph: Graph, plans: Sequence[Placed], n: int) -> float:
    few, _ = _best(plans, lambda p, most: fixed(made, graph, p, plans[0], n, most))
    return _best(plans, lambda p, most: fixed(made, graph, few, p, n, most))[1]


def _best(plans: Sequence[Placed], time: Callable[[Placed, float], float]) -> tuple[Placed, float]:
    """The first plan that takes the least, and its seconds; one that takes more is not timed to its end."""
    best, least = plans[0], math.inf
    for plan in plans:
        if (seconds := time(plan, least)) < least:
            best, least = plan, seconds
    return best, least


def fixed(
    made: Machine, graph: Graph, few: Placed, many: Placed, threads: int, most: float = math.inf
) -> float:
    """Seconds of all requests by plans for passes of few tokens and of many; or of those until `most`."""
    world, lucks = World(made), luck(made.seed)
    world.began = world.now
    cuts = [_cut(graph, few), _cut(graph, many)]
    rows: dict[int, list[tuple[str, list[tuple[Op, int]]]]] = {}  # by the number of tokens in a pass
    for prompt in requests(made.seed):
        for n in (*_pieces(prompt), *[1] * ANSWER):
            world.luck = next(lucks)
            if n not in rows:
                cut = cuts[bucket_of(n) not in ("1", "2-4", "5-8", "9-16")]
                rows[n] = [
                    (name, [(op, n if op.out.rows == "tokens" else 1) for op in ops]) for name, ops in cut
                ]
            for name, ops in rows[n]:
                world.take(name, ops, n, threads)
        if world.at >= most:
            break
    return world.at


def _pieces(prompt: int) -> list[int]:
    return [UBATCH] * (prompt // UBATCH) + ([prompt % UBATCH] if prompt % UBATCH else [])


def _cut(graph: Graph, placed: Placed) -> list[tuple[str, list[Op]]]:
    found: list[tuple[str, list[Op]]] = []
    for unit in units(graph):
        name = placed[unit.scope]
        if not found or found[-1][0] != name:
            found.append((name, []))
        found[-1][1].extend(unit.ops)
    return found
