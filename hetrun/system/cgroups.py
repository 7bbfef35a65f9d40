"""What a container may have of the machine: which CPUs, how much time of them, and how much memory.

Groups of processes lie in a tree, and every group above counts. Version 2 has one tree for everything; of
version 1 each kind of limit has a tree of its own. Where a group lies under a mount point is said by /proc.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hetrun.system.sysfs import cpu_list, line_of, lines_of, number_of

MOST_DEPTH = 64  # groups above each other
CPU = "cpu", "cpuset"
MEMORY = ("memory",)
NO_LIMIT = 1 << 56  # bytes: version 1 writes a huge number for none
# Of memory.stat: pages of files that were not used for a while. The kernel takes them when memory is wanted,
# so they are as good as free, and right after a model was read they are the larger part of what is in use.
CACHED_1, CACHED_2 = "total_inactive_file", "inactive_file"


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """None: no limit that could be read."""

    cpus: frozenset[int] | None = None
    share: float | None = None  # CPUs' worth of time


def read_limits(root: Path) -> CgroupLimits:
    """The limits of the process that /proc/self names, under a root that may be a recording."""
    cpus: frozenset[int] | None = None
    shares: list[float] = []
    for folder in groups(root, CPU):
        shares += _shares(folder)
        if cpus is None:  # the nearest group that says so: those above it have no fewer
            names = "cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"
            cpus = next((found for name in names if (found := cpu_list(folder / name))), None)
    return CgroupLimits(cpus, min(shares, default=None))


def _shares(folder: Path) -> Iterator[float]:
    of_version_2 = line_of(folder / "cpu.max").partition(" ")[::2]
    of_version_1 = line_of(folder / "cpu.cfs_quota_us"), line_of(folder / "cpu.cfs_period_us")
    for quota, period in (of_version_2, of_version_1):
        try:
            share = int(quota) / int(period)
        except (ValueError, ZeroDivisionError, OverflowError):
            continue  # not there, or "max"
        if 0 < share < math.inf:  # version 1 writes -1 for none
            yield share


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit on the memory of a group, and what counts against it; both in bytes."""

    limit: int
    used: int

    @property
    def left(self) -> int:
        """What the group can still get."""
        return max(0, self.limit - self.used)


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The limit that leaves this process least, of all groups above it; None: there is no limit."""
    found = [limit for folder in groups(root, MEMORY) for limit in _memory_limits(folder)]
    return min(found, key=lambda limit: limit.left, default=None)


def _memory_limits(folder: Path) -> Iterator[MemoryLimit]:
    """Above memory.high a group is not killed, but slowed until it is of no use: that is a limit, too."""
    for names, usage, cached in (
        (("memory.max", "memory.high"), "memory.current", CACHED_2),
        (("memory.limit_in_bytes",), "memory.usage_in_bytes", CACHED_1),
    ):
        limits = [number_of(folder / name) for name in names]
        known = [limit for limit in limits if limit is not None and 0 <= limit < NO_LIMIT]
        if known:
            used = number_of(folder / usage) or 0
            yield MemoryLimit(min(known), max(0, used - _cached(folder, cached)))


def _cached(folder: Path, name: str) -> int:
    for line in lines_of(folder / "memory.stat"):
        key, _, value = line.partition(" ")
        if key == name and value.isascii() and value.isdigit() and len(value) < 19:
            return int(value)
    return 0


def groups(root: Path, kinds: Collection[str]) -> Iterator[Path]:
    """The folders of this process's groups, from each upwards to where its tree is mounted."""
    mine = dict(_memberships(root))
    for line in lines_of(root / "proc/self/mountinfo"):
        words = line.split(" ")
        if len(words) < 10 or "-" not in words[6:]:
            continue
        kind, options = words[words.index("-", 6) + 1], words[-1].split(",")
        names = [""] if kind == "cgroup2" else [o for o in options if o in kinds]
        if not kind.startswith("cgroup") or not any(name in mine for name in names):
            continue
        group = next(mine[name] for name in names if name in mine)
        yield from _upwards(_under(root, words[4]), group, words[3])


def _memberships(root: Path) -> Iterator[tuple[str, str]]:
    """Which group this process is in, by the name of each kind of limit; version 2 has no name."""
    for line in lines_of(root / "proc/self/cgroup"):
        _, names, group = [*line.split(":", 2), "", ""][:3]
        for name in names.split(","):
            yield name, group


def _upwards(mount: Path, group: str, mounted: str) -> Iterator[Path]:
    """Where the group's folder is, and those above it. `mounted`: what of the tree the mount point shows."""
    whole, shown = PurePosixPath("/", group), PurePosixPath("/", mounted)
    below = whole.relative_to(shown) if whole.is_relative_to(shown) else PurePosixPath()
    parts = [p for p in below.parts if p not in ("/", "..")][:MOST_DEPTH]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _under(root: Path, path: str) -> Path:
    return root.joinpath(*[p for p in PurePosixPath(path).parts if p not in ("/", "..")])
