"""What the machine's CPUs share: sockets, NUMA nodes, last-level caches, second-level caches, cores.

The kernel says it in files (sysfs), and says little on virtual machines, in containers and on some boards.
What it does not say is left out: the tree is never wrong about more than the kernel is, and always there.
Where two statements cross each other, the outer level wins and cuts the inner one, so that it stays a tree.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from hetrun.system.cgroups import read_limits
from hetrun.system.sysfs import cpu_list, cpu_mask, line_of, number_of
from hetrun.system.units import counted

LEVELS = "socket", "node", "cache", "module"  # from the outermost
UNKNOWN = -1  # in a path: the group is all that is around it
SIBLINGS = (
    "topology/core_cpus",
    "topology/thread_siblings",
)  # the hardware threads of a core; what older systems have
# A core is of the next kind below where it is so much slower than the fastest of its kind: the favoured cores
# of one kind differ by less than a tenth, the kinds of one chip by a quarter and more.
SAME_KIND = 0.87


@dataclass(frozen=True, slots=True)
class Core:
    """A core that may be used, and where it is: on each level the number of the group that it belongs to."""

    cpus: tuple[int, ...]  # what the system schedules on: the core, or each of its hardware threads
    kind: int  # 0: the fastest of the machine
    path: tuple[int, ...]  # one number for each of LEVELS


@dataclass(frozen=True, slots=True)
class TopoTree:
    """The cores that may be used, in the order of the tree."""

    cores: tuple[Core, ...]
    share: float | None = None  # CPUs' worth of time that a container has, where that is less
    cache_bytes: int = 0  # of the largest last-level cache

    @property
    def cpus(self) -> tuple[int, ...]:
        """All CPUs that may be used, ascending."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def threads(self) -> int:
        """How many threads can run at once."""
        n = len(self.cpus)
        return n if self.share is None else max(1, min(n, math.ceil(self.share)))

    @property
    def kinds(self) -> int:
        """How many kinds of cores there are."""
        return 1 + max(core.kind for core in self.cores)

    def groups(self, level: str) -> list[tuple[Core, ...]]:
        """The cores of each socket, node, cache or module."""
        at = LEVELS.index(level)
        if level == "node":  # on old machines several sockets are one node
            nodes = sorted(self.cores, key=lambda core: core.path[at])
            return [tuple(group) for _, group in groupby(nodes, lambda core: core.path[at])]
        return [tuple(group) for _, group in groupby(self.cores, lambda core: core.path[: at + 1])]

    def to_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        facts: dict[str, Any] = {"cpus": list(self.cpus), "threads": self.threads}
        facts |= {f"{level}s": [_cpus(group) for group in self.groups(level)] for level in LEVELS}
        facts["cores"] = [{"cpus": list(core.cpus), "kind": core.kind} for core in self.cores]
        return facts

    def to_text(self) -> str:
        """One line for people."""
        parts = [counted(len(self.cores), "core")]
        if self.kinds > 1:
            parts[0] += f" ({_kinds(self.cores)})"
        if (n := len(self.cpus)) != len(self.cores):
            parts.append(f"{n} hardware threads")
        parts.append(counted(len(self.groups("socket")), "socket"))
        parts.append(counted(len(self.groups("node")), "NUMA node"))
        if all(core.path[LEVELS.index("cache")] != UNKNOWN for core in self.cores):
            caches = self.groups("cache")
            parts.append(f"{counted(len(caches), 'last-level cache')} of {_sizes(caches)}")
        if self.threads < n:
            parts.append(f"time for {counted(self.threads, 'thread')} in this container")
        return ", ".join(parts)


def read_topology(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> TopoTree:
    """The tree of a machine whose files lie under a root, of the CPUs that are allowed (None: all)."""
    limits = read_limits(root)
    cpus = _usable(root, allowed, limits.cpus)
    groups = _Groups(root / "sys/devices/system/cpu", cpus)
    paths = _paths(root, groups)
    kinds = _kinds_of(root, cpus)
    siblings = groups.by(*SIBLINGS)
    cores = [
        Core(tuple(cores), min(kinds[cpu] for cpu in cores), paths[cores[0]])
        for cores in _members({cpu: (*paths[cpu], siblings.get(cpu, cpu)) for cpu in cpus})
    ]
    cores.sort(key=lambda core: (core.path, core.cpus))
    share = limits.share if limits.share is not None and limits.share < len(cpus) else None
    return TopoTree(tuple(cores), share, groups.cache_bytes)


@cache
def this_machine() -> TopoTree:
    """The machine that this is. Asked once: later the thread that asks may have been put on fewer CPUs."""
    return read_topology(allowed=_allowed())


def physical_cores(root: Path = Path("/")) -> int | None:
    """How many cores the whole machine has; None where the system does not say."""
    system = root / "sys/devices/system/cpu"
    labels = _Groups(system, sorted(_numbered(system, "cpu"))).by(*SIBLINGS)
    return len(set(labels.values())) or None


def _allowed() -> Iterable[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _usable(root: Path, allowed: Iterable[int] | None, of_group: frozenset[int] | None) -> list[int]:
    """The CPUs that are online and allowed. Who contradicts what is known already is not believed."""
    system = root / "sys/devices/system/cpu"
    there = [cpu for cpu in _numbered(system, "cpu") if line_of(system / f"cpu{cpu}/online") != "0"]
    online = cpu_list(system / "online") or frozenset(there)
    known = frozenset(allowed) if allowed is not None else online
    for fewer in (online, of_group):
        known = known & fewer if fewer and known & fewer else known
    return sorted(known) or [0]


def _numbered(folder: Path, name: str) -> Iterator[int]:
    """The numbers of entries as cpu0, cpu1, cpu17."""
    try:
        entries = os.listdir(folder)
    except OSError:
        return
    for entry in entries:
        if found := re.fullmatch(rf"{name}(\d{{1,5}})", entry):
            yield int(found[1])


class _Groups:
    """Which CPUs belong together, by what the files of each say. Numbered by the first CPU of each."""

    def __init__(self, system: Path, cpus: Sequence[int]) -> None:
        self._system, self.cpus = system, cpus
        self.cache_bytes = 0

    def by(self, *names: str) -> dict[int, int]:
        """By a list of CPUs, of which one file after the other is tried, as a list or as bits."""
        return self._share(lambda cpu: self._listed(self._folder(cpu), names))

    def number(self, name: str) -> dict[int, int]:
        """By a number that a file has; -1 is written where it is not known."""
        found = {cpu: number_of(self._folder(cpu) / name) for cpu in self.cpus}
        return {cpu: number for cpu, number in found.items() if number is not None and number >= 0}

    def caches(self, last: bool) -> dict[int, int]:
        """By the last-level cache, or by the one before it."""
        return self._share(lambda cpu: self._cache(cpu, last))

    def _folder(self, cpu: int) -> Path:
        return self._system / f"cpu{cpu}"

    def _listed(self, folder: Path, names: Iterable[str]) -> frozenset[int]:
        for name in names:
            if found := cpu_list(folder / f"{name}_list") or cpu_mask(folder / name):
                return found
        return frozenset()

    def _cache(self, cpu: int, last: bool) -> frozenset[int]:
        folder = self._folder(cpu) / "cache"
        levels: dict[int, Path] = {}
        for index in sorted(_numbered(folder, "index")):
            level = number_of(folder / f"index{index}/level") or 0
            if level > 1 and line_of(folder / f"index{index}/type") != "Instruction":
                levels[level] = folder / f"index{index}"
        at = max(levels, default=0) if last else 2
        if at not in levels:
            return frozenset()
        if last:
            self.cache_bytes = max(self.cache_bytes, number_of(levels[at] / "size") or 0)
        return self._shared(levels[at])

    def _shared(self, index: Path) -> frozenset[int]:
        return cpu_list(index / "shared_cpu_list") or cpu_mask(index / "shared_cpu_map")

    def _share(self, of: Callable[[int], frozenset[int]]) -> dict[int, int]:
        """Ask each CPU that no earlier one has named."""
        found: dict[int, int] = {}
        for cpu in self.cpus:
            if cpu not in found and cpu in (named := of(cpu)):
                found |= {other: cpu for other in named if other not in found}
        return found


def _paths(root: Path, groups: _Groups) -> dict[int, tuple[int, ...]]:
    """Where each CPU is, on each level. What is not said is one group for all that is around it."""
    caches, modules = groups.caches(last=True), groups.caches(last=False)
    sockets = groups.number("topology/physical_package_id")
    # Some boards call each kind of cores a package. What shares a cache is one socket.
    sockets = {cpu: sockets.get(caches.get(cpu, cpu), sockets[cpu]) for cpu in sockets}
    nodes = _nodes(root, groups.cpus)
    cores = groups.by(*SIBLINGS)
    alone = _of_one_core(caches, cores)  # no group of cores
    return {
        cpu: (
            sockets.get(cpu, 0),
            nodes.get(cpu, 0),
            caches.get(cpu, UNKNOWN) if cpu not in alone else UNKNOWN,
            modules.get(cpu, UNKNOWN),
        )
        for cpu in groups.cpus
    }


def _of_one_core(caches: Mapping[int, int], cores: Mapping[int, int]) -> set[int]:
    """The CPUs whose last-level cache no other core has."""
    sharing = {cache: {cores.get(cpu, cpu) for cpu in cpus} for cache, cpus in _inverted(caches).items()}
    return {cpu for cpu, cache in caches.items() if len(sharing[cache]) == 1}


def _nodes(root: Path, cpus: Iterable[int]) -> dict[int, int]:
    """The NUMA node of each CPU: memory without CPUs is a node, too, and is not meant."""
    found: dict[int, int] = {}
    folder = root / "sys/devices/system/node"
    for node in sorted(_numbered(folder, "node")):
        named = cpu_list(folder / f"node{node}/cpulist") or cpu_mask(folder / f"node{node}/cpumap")
        found |= {cpu: node for cpu in cpus if cpu in named and cpu not in found}
    return found


def _kinds_of(root: Path, cpus: Sequence[int]) -> dict[int, int]:
    """0 for CPUs of the fastest kind, 1 for the next. What is called efficient is slower than what is not."""
    devices = root / "sys/devices"
    atoms = cpu_list(devices / "cpu_atom/cpus") or cpu_list(devices / "cpu/types/intel_atom/cpulist")
    kinds: dict[int, int] = {}
    for some in ([c for c in cpus if c not in atoms], [c for c in cpus if c in atoms]):
        below = 1 + max(kinds.values(), default=-1)
        kinds |= {cpu: below + kind for cpu, kind in _by_speed(devices / "system/cpu", some).items()}
    return kinds


SPEEDS = "cpu_capacity", "cpufreq/cpuinfo_max_freq", "cpufreq/base_frequency", "acpi_cppc/highest_perf"


def _by_speed(system: Path, cpus: Sequence[int]) -> dict[int, int]:
    """By the first measure of speed that all of them have, and that tells them apart."""
    for name in SPEEDS:
        speeds = {cpu: number_of(system / f"cpu{cpu}/{name}") or 0 for cpu in cpus}
        if not all(speed > 0 for speed in speeds.values()):
            continue
        kinds: dict[int, int] = {}
        kind, fastest = 0, max(speeds.values(), default=0)
        for cpu in sorted(cpus, key=lambda cpu: -speeds[cpu]):
            if speeds[cpu] < SAME_KIND * fastest:
                kind, fastest = kind + 1, speeds[cpu]
            kinds[cpu] = kind
        if kind:
            return kinds
    return dict.fromkeys(cpus, 0)


def _members(labels: Mapping[int, Any]) -> list[list[int]]:
    """The CPUs that have the same label."""
    return [sorted(cpus) for cpus in _inverted(labels).values()]


def _inverted(labels: Mapping[int, Any]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for cpu, label in labels.items():
        found.setdefault(label, []).append(cpu)
    return found


def _cpus(cores: Iterable[Core]) -> list[int]:
    return sorted(cpu for core in cores for cpu in core.cpus)


def _kinds(cores: Iterable[Core]) -> str:
    numbers: dict[int, int] = {}
    for core in cores:
        numbers[core.kind] = numbers.get(core.kind, 0) + 1
    names = ["fast", "slow"] if len(numbers) == 2 else [f"of kind {k + 1}" for k in sorted(numbers)]
    return ", ".join(f"{numbers[kind]} {name}" for kind, name in zip(sorted(numbers), names, strict=True))


def _sizes(groups: Iterable[Sequence[Core]]) -> str:
    sizes = sorted({len(group) for group in groups})
    return counted(sizes[0], "core") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} cores"
