"""Control groups that limit memory, of both versions: made, entered by a command, read, removed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from hetrun.system.sysfs import lines_of, number_of

ROOT = Path("/sys/fs/cgroup")
# Of equal limits that with swap would be met first, and new kernels do not count how often.
PAGE = os.sysconf("SC_PAGE_SIZE")
GONE_S = 5.0  # until a group whose processes have ended may be removed
_number = count()


@dataclass(frozen=True, slots=True)
class GroupFiles:
    """Where a version of control groups says what."""

    limit: str
    swap: str
    swap_with_memory: bool  # the number for swap has the limit in it
    used: str
    peak: str
    shared: str  # the rest are lines of memory.stat
    anonymous: str
    kernel: str


VERSION_1 = GroupFiles(
    limit="memory.limit_in_bytes",
    swap="memory.memsw.limit_in_bytes",
    swap_with_memory=True,
    used="memory.usage_in_bytes",
    peak="memory.max_usage_in_bytes",
    shared="total_shmem",
    anonymous="total_rss",
    kernel="memory.kmem.usage_in_bytes",
)
VERSION_2 = GroupFiles(
    limit="memory.max",
    swap="memory.swap.max",
    swap_with_memory=False,
    used="memory.current",
    peak="memory.peak",
    shared="shmem",
    anonymous="anon",
    kernel="kernel",
)


class MemoryGroup:
    """A control group with a limit of memory and no swap."""

    def __init__(self, folder: Path, files: GroupFiles, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._files = files
        (folder / files.limit).write_text(str(limit))
        # Without swap in the kernel there is no such file, and nothing to switch off.
        with suppress(FileNotFoundError):
            (folder / files.swap).write_text(str(limit + PAGE if files.swap_with_memory else 0))

    def command(self, words: Sequence[str]) -> list[str]:
        """The same command, which goes into the group before its program starts."""
        return ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *words]

    @property
    def kills(self) -> int:
        """Processes that the kernel has killed here because memory was short."""
        return self._line("memory.oom_control", "oom_kill") + self._line("memory.events", "oom_kill")

    @property
    def failures(self) -> int:
        """How often the limit was met; then the kernel takes pages of files, or kills."""
        return (number_of(self.folder / "memory.failcnt") or 0) + self._line("memory.events", "max")

    @property
    def peak(self) -> int:
        """The most that counted against the limit, pages of files with it, in bytes."""
        return number_of(self.folder / self._files.peak) or 0

    @property
    def fixed(self) -> int:
        """What the kernel cannot take back now: anonymous and shared memory, and its own, in bytes."""
        names = {self._files.anonymous, self._files.shared, self._files.kernel}
        stat = sum(int(value) for name, value in self._stat() if name in names)
        return stat + (number_of(self.folder / self._files.kernel) or 0)

    @property
    def refaults(self) -> int:
        """Pages of files that were read again because they had been taken back."""
        # Old kernels do not tell files from the rest.
        found = dict(self._stat())
        names = ("total_workingset_refault_file", "workingset_refault_file", "workingset_refault")
        return next((int(found[name]) for name in names if name in found), 0)

    def remove(self) -> None:
        """Once its processes have ended; those that a command left behind are ended here."""
        until = time.monotonic() + GONE_S
        while True:
            try:
                self.folder.rmdir()
                return
            except OSError:  # the last process is not quite gone
                if time.monotonic() > until:
                    raise
                for pid in lines_of(self.folder / "cgroup.procs"):
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)

    def _stat(self) -> list[tuple[str, str]]:
        words = [line.split() for line in lines_of(self.folder / "memory.stat")]
        return [(w[0], w[1]) for w in words if len(w) == 2]

    def _line(self, name: str, key: str) -> int:
        words = [line.split() for line in lines_of(self.folder / name)]
        return next((int(w[1]) for w in words if len(w) == 2 and w[0] == key), 0)


def places() -> Iterator[tuple[Path, GroupFiles]]:
    """Folders in which a group may be made: this process's own groups, and those at the top of each tree."""
    for mount, files in ((ROOT / "memory", VERSION_1), (ROOT, VERSION_2), (ROOT / "unified", VERSION_2)):
        controllers = mount / "cgroup.controllers"
        if files is VERSION_2 and "memory" not in " ".join(lines_of(controllers)).split():
            continue
        if mount.is_dir():
            yield mount, files


@contextmanager
def limited(nbytes: int) -> Iterator[MemoryGroup]:
    """A group with this limit, removed at the end; OSError where none can be made."""
    reasons = []
    for mount, files in places():
        folder = mount / f"hetrun-test-{os.getpid()}-{next(_number)}"
        try:
            _delegate(mount, files)
            folder.mkdir()
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        try:
            group = MemoryGroup(folder, files, nbytes)
        except OSError as error:  # the controller is not there for groups below this one
            folder.rmdir()
            reasons.append(f"{folder}: {error.strerror}")
            continue
        try:
            yield group
        finally:
            group.remove()
        return
    raise OSError(f"no control group can be made here: {'; '.join(reasons) or 'none limits memory'}")


def missing() -> str:
    """Why no control group can be made here, or nothing."""
    try:
        with limited(64 << 20):
            return ""
    except OSError as error:
        return str(error)


def _delegate(mount: Path, files: GroupFiles) -> None:
    """Of version 2 the groups below get the controller only if their parent says so."""
    if files is VERSION_2:
        (mount / "cgroup.subtree_control").write_text("+memory")
