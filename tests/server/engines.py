"""Scripted engines of a worker whose way goes on when a test says so, not when some time is over."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.fakes import FakeEngine

TOKENS = 300


def deadlock(free: Path) -> None:
    """Wait in a native call for a lock that is not given back before this file is there."""
    libc = ctypes.CDLL(None)
    lock = ctypes.create_string_buffer(64)  # all zeroes is a lock that is free
    libc.pthread_mutex_lock(lock)

    def unlock() -> None:
        while not free.exists():
            time.sleep(0.005)
        libc.pthread_mutex_unlock(lock)

    threading.Thread(target=unlock, daemon=True).start()
    libc.pthread_mutex_lock(lock)


def compute(seconds: float) -> None:
    """Compute on all cores for so long, whatever comes of it."""
    data, end = bytes(1 << 20), time.monotonic() + seconds

    def work() -> None:
        while time.monotonic() < end:
            hashlib.sha256(data).digest()  # without the interpreter lock

    threads = [threading.Thread(target=work, daemon=True) for _ in os.sched_getaffinity(0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Told(FakeEngine):
    """Has three orders more:

    compute SECONDS  keeps all cores busy in native calls, and answers then
    lock FILE        waits in a native call until the file is there, and answers then
    halfway FILE     tells 300 tokens, but kills the process in the middle of them unless the file is there
    """

    def reply(self, prompt: str) -> Iterator[str]:
        order, _, file = prompt.partition(" ")
        match order:
            case "compute":
                compute(float(file))
                yield "computed"
            case "lock":
                deadlock(Path(file))
                yield "free again"
            case "halfway":
                for i in range(TOKENS):
                    if i == TOKENS // 2 and not Path(file).exists():
                        Path(file).touch()
                        os.kill(os.getpid(), signal.SIGABRT)
                        threading.Event().wait()
                    yield "ha "
            case _:
                yield from super().reply(prompt)
