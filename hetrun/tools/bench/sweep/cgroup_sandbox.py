"""Groups with a limit on memory, for processes that are measured in a budget (Linux's control groups).

A limit holds for everything that the processes of a group take: what they allocate, and the pages of files
that they read first. So a peer that maps its model has just the page cache that its group leaves, and one
that wants more is killed by the kernel. Groups are made below our own, so the limits above us hold as well.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from hetrun.errors import UserError
from hetrun.system.cgroups import MEMORY, groups
from hetrun.system.sysfs import line_of, lines_of, number_of

NAME = "hetrun-bench"
PATIENCE_S = 5.0  # for the kernel to take the last process of a group away
PAUSE_S = 0.01
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Version:
    """What the kernel calls things."""

    limit: str
    swap: str  # a limit too; it is there only where swap is counted
    peak: str
    reclaim: str  # a number written there makes the kernel take pages away
    events: str  # the file that has a line `oom_kill N`


VERSION_1 = Version(
    limit="memory.limit_in_bytes",
    swap="memory.memsw.limit_in_bytes",
    peak="memory.max_usage_in_bytes",
    reclaim="memory.force_empty",
    events="memory.oom_control",
)
VERSION_2 = Version("memory.max", "memory.swap.max", "memory.peak", "memory.reclaim", "memory.events")


@dataclass(frozen=True, slots=True)
class SandboxGroup:
    """A group that lasts while it is measured."""

    folder: Path
    version: Version
    limit: int

    @property
    def prefix(self) -> tuple[str, ...]:
        """What stands in front of a command that is to run in it. It joins before the command begins, so that
        everything that the command ever takes is counted."""
        return ("/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', str(self.folder / "cgroup.procs"))

    @property
    def peak(self) -> int | None:
        """The most that its processes had at once; None where the kernel does not say (before Linux 5.19)."""
        return number_of(self.folder / self.version.peak)

    def empty(self) -> None:
        """Have the kernel take away what its processes can read again: others would find the pages of a file
        that they have mapped. What it cannot take stays."""
        with suppress(OSError):
            (self.folder / self.version.reclaim).write_text(str(self.limit))

    @property
    def killed(self) -> bool:
        """Whether one of its processes was killed because the limit was reached."""
        counts = dict(line.split(" ", 1) for line in lines_of(self.folder / self.version.events))
        return counts.get("oom_kill", "0").strip() != "0"


@contextmanager
def confined(nbytes: int, root: Path = Path("/")) -> Iterator[SandboxGroup]:
    """A group for `nbytes` bytes; processes still in it at the end are killed, and it is removed."""
    group = _make(nbytes, root)
    try:
        yield group
    finally:
        _remove(group.folder)


def why_not(root: Path = Path("/")) -> str | None:
    """Why no group can be made here; None if one can."""
    try:
        with confined(1 << 30, root):
            return None
    except UserError as error:
        return str(error)


def _make(nbytes: int, root: Path) -> SandboxGroup:
    refusals = []
    for parent, version in _places(root):
        _sweep_out(parent, root)
        folder = parent / f"{NAME}-{os.getpid()}-{next(_numbers)}"
        try:
            folder.mkdir()
        except OSError as error:
            refusals.append(f"{parent}: {error.strerror}")
            continue
        try:
            (folder / version.limit).write_text(str(nbytes))
            _forbid_swap(folder, version, nbytes)
        except OSError as error:
            refusals.append(f"{folder}: {error.strerror}")
            _remove(folder)
            continue
        return SandboxGroup(folder, version, nbytes)
    said = "; ".join(refusals[:2]) or "the kernel offers no control group that limits memory"
    raise UserError(
        f"no group of processes with a limit on memory can be made here ({said}); run as root, or in a "
        "session whose control group has memory delegated to it"
    )


def _forbid_swap(folder: Path, version: Version, nbytes: int) -> None:
    """What is swapped out would not count."""
    if (folder / version.swap).exists():
        (folder / version.swap).write_text(str(nbytes if version is VERSION_1 else 0))


def _places(root: Path) -> Iterator[tuple[Path, Version]]:
    """Where a group could be made, from our own group upwards."""
    for folder in groups(root, MEMORY):
        if (folder / VERSION_1.limit).exists():
            yield folder, VERSION_1
        elif "memory" in line_of(folder / "cgroup.subtree_control").split():
            # Version 2 lets a group have processes or children with limits, not both: rarely our own.
            yield folder, VERSION_2


def _sweep_out(parent: Path, root: Path) -> None:
    """Remove what runs left behind that were killed; a group in which something runs is not removed."""
    for folder in parent.glob(f"{NAME}-*"):
        found = re.fullmatch(rf"{NAME}-(\d+)-\d+", folder.name)
        if found and not (root / "proc" / found[1]).exists():
            with suppress(OSError):
                folder.rmdir()


def _remove(folder: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        for line in lines_of(folder / "cgroup.procs"):
            with suppress(OSError, ValueError):
                os.kill(int(line), signal.SIGKILL)
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > end:
                return  # the next run tries again
        time.sleep(PAUSE_S)
