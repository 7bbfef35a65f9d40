"""What other programs take of the cores that this process may use, as the system tells it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from time import process_time, sleep

LOOKS, LOOKS_S = 10, 0.05  # looks at what else runs, and how long they take in all
# Columns of a line of /proc/stat: user, nice, system, interrupts (two kinds), taken by a hypervisor.
BUSY = (1, 2, 3, 6, 7, 8)
WRONG = 0.5  # cores: so much more than all that runs cannot be our own


class OtherPrograms:
    """Compares what the cores did with what this process did, between one look and the next.

    A container may see other cores than its own, or none at all. Where they cannot be read, nothing is known,
    and the caller has to find out by running.
    """

    def __init__(self, stat: Path = Path("/proc/stat"), cores: Iterable[int] | None = None) -> None:
        """`cores` are those that count: by default all that this process may use."""
        self._stat = stat
        self._cores = frozenset(os.sched_getaffinity(0) if cores is None else cores)
        self._tick = 1 / os.sysconf("SC_CLK_TCK")
        self._at = self._own = 0.0
        self._busy: float | None = None
        self.count = len(self._cores)

    def look(self, at: float) -> float | None:
        """Cores that others kept busy since the last look, on average; None if that is not known."""
        before, own_before, then = self._busy, self._own, self._at
        self._busy, self._own, self._at = self._read(), process_time(), at
        seconds = at - then
        if before is None or self._busy is None or seconds <= 0:
            return None
        busy, own = (self._busy - before) / seconds, (self._own - own_before) / seconds
        return None if own > busy + WRONG else max(0.0, busy - own)

    def _read(self) -> float | None:
        """Seconds that the cores were busy ever; None if they are not there, or are those of other cores."""
        try:
            if self._stat.stat().st_dev != self._stat.parent.stat().st_dev:
                return None  # something like LXCFS lies over it, with cores of its own
            lines = self._stat.read_text(encoding="ascii").splitlines()
            mine = [line.split() for line in lines if line.startswith("cpu") and not line.startswith("cpu ")]
            found = {int(columns[0][3:]): columns for columns in mine}
            ticks = sum(int(found[core][i]) for core in self._cores for i in BUSY)
        except (OSError, ValueError, LookupError):
            return None
        return ticks * self._tick


def others_running() -> float:
    """Threads of other programs that compute at this moment, on average over a few looks."""
    looks = []
    for _ in range(LOOKS):
        with open("/proc/loadavg", encoding="ascii") as numbers:
            looks.append(int(numbers.read().split()[3].split("/")[0]) - 1)
        sleep(LOOKS_S / LOOKS)
    return sum(looks) / LOOKS
