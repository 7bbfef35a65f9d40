"""A process that reads what strangers wrote, from inside: it gives up its rights, and talks over a pipe.

Its parent is `hetrun.system.sandbox.child`. It then has no file but its pipe and can open none, the kernel
takes no calls from it but those of a computing program, and it ends with its parent, whose end of the pipe
closes.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from hetrun.system.sandbox import landlock, seccomp
from hetrun.system.sandbox.kernel import Unrestricted

PART = 1 << 20  # bytes that are read at once
SWITCH = "HETRUN_SANDBOX"  # the variable of the option
KILLED_FIRST = "1000"  # the most there is; any process may raise its own


def give_up_rights() -> int:
    """No files, no processes and no core dumps from here on; how many bytes of memory are in use.

    Limits say it to any kernel, Landlock and seccomp to those that have them: these also take away what has
    no limit, and from root.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _be_killed_first()
    _keep_from_files()
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
        resource.setrlimit(kind, (0, 0))
    _keep_from_calls()
    return used


def _be_killed_first() -> None:
    """Where a container's memory is short, the kernel ends this process, and not the one with the model."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(KILLED_FIRST)


def _keep_from_files() -> None:
    """Landlock, before there is a limit on descriptors: its rules are one."""
    if is_wanted():
        with suppress(Unrestricted):
            landlock.restrict({})


def _keep_from_calls() -> None:
    if is_wanted():
        with suppress(Unrestricted):
            seccomp.computing_only()


def is_wanted() -> bool:
    """Whether the user has not turned restrictions by the kernel off."""
    return os.environ.get(SWITCH) != "off"


@contextmanager
def bounded_time(seconds: float, out: type[BaseException]) -> Iterator[None]:
    """A limit on seconds of computing: `out` is raised, and if Python does not hear it, the system ends us.

    `out` should be a BaseException, which no `except Exception` stops.
    """

    def interrupted(signum: int, frame: FrameType | None) -> NoReturn:
        raise out

    signal.signal(signal.SIGVTALRM, interrupted)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.8 * seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # has no handler
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def bound_memory(soft: int, hard: int) -> None:
    """How many bytes of memory there may be, and how far this limit may be raised later."""
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def read(pipe: int, size: int) -> bytes:
    """`size` bytes from the parent; the end if it is gone."""
    parts = []
    while size:
        part = os.read(pipe, min(size, PART))
        if not part:
            os._exit(0)  # the parent is gone
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write(pipe: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(pipe, left) :]
