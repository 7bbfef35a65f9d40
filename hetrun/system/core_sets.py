"""Which cores a phase may run on: a handful of candidates, chosen over the tree of the machine (Sandwich).

Reading weights is limited by memory: a few cores of each last-level cache often reach all of its bandwidth,
and the others only disturb them. Products are limited by the cores: there hardware threads of one core and
slow cores may help or hurt. What is best is measured; here is only said what there is to choose from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hetrun.system.cpu_topology import LEVELS, UNKNOWN, Core, TopoTree
from hetrun.system.units import counted

MOST_SETS = 16
PARTS = 1 / 2, 3 / 4, 1 / 4  # of the cores of each cache, besides all and one
MOST_COUNTS = 5  # numbers of threads that are measured throughout

Cores = Sequence[Core]


@dataclass(frozen=True, slots=True)
class CoreSet:
    """Some CPUs, and how many threads run on them: one on each, or fewer where a container has less time."""

    name: str
    cpus: tuple[int, ...]  # ascending
    threads: int

    @property
    def pinned(self) -> bool:
        """Whether each thread has a CPU of its own."""
        return self.threads == len(self.cpus) > 1

    def to_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {"name": self.name, "threads": self.threads, "cpus": list(self.cpus)}


def core_sets(tree: TopoTree) -> tuple[CoreSet, ...]:
    """The candidates, by ascending number of threads. The first is one core, the last is all there is."""
    if tree.share is not None:
        return _of_a_share(tree)
    found: dict[tuple[int, tuple[int, ...]], CoreSet] = {}
    for name, cpus, threads in _wanted(tree):
        made = CoreSet(name, tuple(sorted(cpus)), threads)
        if len(found) < MOST_SETS and (threads > 1 or not found):
            found.setdefault((threads, made.cpus), made)
    return tuple(sorted(found.values(), key=lambda s: (s.threads, s.cpus)))


def counts(tree: TopoTree) -> tuple[int, ...]:
    """The numbers of threads worth measuring, ascending: of the candidates those that come first."""
    if tree.share is not None:
        return tuple(s.threads for s in _of_a_share(tree))
    first = dict.fromkeys(threads for _, _, threads in _wanted(tree))
    return tuple(sorted(list(first)[:MOST_COUNTS]))


def wide(tree: TopoTree) -> tuple[int, ...]:
    """Those of the counts that leave no core idle: what is limited by computing wants one of them."""
    return tuple(n for n in counts(tree) if n >= min(len(tree.cores), tree.threads))


def to_text(tree: TopoTree, sets: Sequence[CoreSet]) -> Iterator[str]:
    """A line for the machine, one for each candidate, and one where that is all there is to say."""
    yield tree.to_text()
    for s in sets:
        where = "anywhere" if s.cpus == tree.cpus and not s.pinned else f"on CPU {in_ranges(s.cpus)}"
        yield f"  {counted(s.threads, 'thread')}: {s.name}, {where}"
    if len(tree.cpus) == 2:
        yield "  with so few cores there is no other choice"


def in_ranges(cpus: Sequence[int]) -> str:
    """As the kernel writes them: "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _of_a_share(tree: TopoTree) -> tuple[CoreSet, ...]:
    """A limit of time leaves the place to the system: others run here, too, at unknown places."""
    numbers = sorted({1, -(-tree.threads // 2), tree.threads})
    return tuple(CoreSet("anywhere", tree.cpus, n) for n in numbers)


def _wanted(tree: TopoTree) -> Iterator[tuple[str, Sequence[int], int]]:
    """Names, CPUs and threads, from the most to the least wanted, some of them more than once."""
    fastest = [core for core in tree.cores if core.kind == 0]
    # One thread may be on any of them: the system moves it away from what else runs.
    yield "one core", _cpus(fastest, every=True), 1
    known = all(core.path[LEVELS.index("cache")] != UNKNOWN for core in tree.cores)
    scopes = [_Scope(_largest(tree.groups(level)), where, known) for level, where in SCOPES]
    machine = _Scope(tree.cores, "", known)
    wanted = [
        machine.whole(),
        machine.thinned(),
        *[s.whole() for s in scopes],
        *[s.thinned() for s in scopes],
    ]
    for name, cpus in chain.from_iterable(wanted):
        yield name, cpus, len(cpus)


SCOPES = (("socket", " of one socket"), ("node", " of one NUMA node"), ("cache", " around one cache"))


@dataclass(frozen=True, slots=True)
class _Scope:
    """The machine, or one part of it."""

    cores: Cores
    where: str
    known: bool  # what shares a last-level cache

    def whole(self) -> Iterator[tuple[str, list[int]]]:
        """One thread for each core, all hardware threads, and the same without the slow kinds of cores."""
        kinds = sorted({core.kind for core in self.cores})
        fast = [[core for core in self.cores if core.kind <= kind] for kind in reversed(kinds[:-1])]
        yield f"all cores{self.where}", _cpus(self.cores)
        for some in fast:
            yield f"the {len(some)} fast cores{self.where}", _cpus(some)
        yield f"all hardware threads{self.where}", _cpus(self.cores, every=True)
        for some in fast:
            yield f"all hardware threads of the {len(some)} fast cores{self.where}", _cpus(some, every=True)

    def thinned(self) -> Iterator[tuple[str, list[int]]]:
        """A part of the cores of each last-level cache, one at least; the others stay idle."""
        groups = _grouped(self.cores, lambda core: core.path[:3])
        what = "cache" if self.known else "part"
        for part in (*PARTS, 0.0):
            some = [_spread(group, max(1, math.ceil(part * len(group)))) for group in groups]
            least, most = min(map(len, some)), max(map(len, some))
            n = counted(most, "core") if least == most else f"{least} to {most} cores"
            yield f"{n} of each {what}{self.where}", [cpu for group in some for cpu in _cpus(group)]


def _spread(cores: Cores, n: int) -> list[Core]:
    """The fastest n; one of each module (that share a second-level cache) before another's second."""
    order: list[tuple[int, int, int, Core]] = []
    for at, module in enumerate(_grouped(cores, lambda core: core.path)):
        # What has a number of its own only because nothing is known is one module: then the order stays.
        order += [(core.kind, turn, at, core) for turn, core in enumerate(module)]
    return [core for *_, core in sorted(order, key=lambda row: row[:3])[:n]]


def _largest(groups: Iterable[Cores]) -> Cores:
    """The group with most fast cores, then with most cores; of equal ones the first."""
    return max(groups, key=lambda cores: (sum(core.kind == 0 for core in cores), len(cores)))


def _grouped(cores: Cores, key: Callable[[Core], Any]) -> list[list[Core]]:
    found: dict[Any, list[Core]] = {}
    for core in cores:
        found.setdefault(key(core), []).append(core)
    return list(found.values())


def _cpus(cores: Cores, every: bool = False) -> list[int]:
    return [cpu for core in cores for cpu in (core.cpus if every else core.cpus[:1])]
