"""How much memory there is, on the machine and in a container's limit, and what this process has of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hetrun.system.cgroups import memory_limit
from hetrun.system.sysfs import lines_of
from hetrun.system.units import format_bytes


@dataclass(frozen=True, slots=True)
class Free:
    """Memory that a new allocation could take without swapping."""

    nbytes: int
    limit: int | None = None  # of the container, where that is what there is least of

    @property
    def of(self) -> str:
        """What it is free of, in words."""
        return (
            "the machine's memory"
            if self.limit is None
            else f"the container's limit of {format_bytes(self.limit)}"
        )


def free_memory(root: Path = Path("/")) -> Free:
    """What is free on the machine, or of a container's limit where that is less."""
    machine, group = _machine_memory(root), memory_limit(root)
    return Free(machine) if group is None or group.left >= machine else Free(group.left, group.limit)


def machine_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that the machine has, or a container's limit where that is less."""
    whole, group = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit(root)
    return whole if group is None else min(whole, group.limit)


def available_memory() -> int:
    """Bytes that a new allocation could take without swapping, or passing a container's limit."""
    return free_memory().nbytes


def _machine_memory(root: Path) -> int:
    for line in lines_of(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable" and value.split()[:1] and value.split()[0].isdecimal():
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def process_memory() -> int:
    """Bytes of this process that lie in memory now; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as numbers:
            return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


FRONT = 40 << 20  # of a front end that has imported all it needs, and has its buffers


def front_bytes() -> int:
    """What this process will take that starts a worker: a memory limit is for both of them."""
    return max(FRONT, process_memory())
