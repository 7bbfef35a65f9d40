"""A process that reads what strangers wrote, from inside: it gives up its rights, and talks over a pipe.

Its parent is `hetrun.system.sandbox.child`. It then has no file but its pipe and can open none, and it ends
with its parent, whose end of the pipe closes.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

PART = 1 << 20  # bytes that are read at once


def give_up_rights() -> int:
    """No files, no processes and no core dumps from here on; how many bytes of memory are in use."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
        resource.setrlimit(kind, (0, 0))
    return used


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
