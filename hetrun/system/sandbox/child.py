"""A process that reads what strangers wrote, from outside: started, asked, given up.

`hetrun.system.sandbox.inside` has its own side. What it sends may be anything: a stranger may speak for it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TypeVar

from hetrun.errors import HetrunError
from hetrun.system import subprocesses
from hetrun.system.run_queue import TimeLimit
from hetrun.system.sandbox.framing import HEAD, length

# All that the child sees of our environment, which may hold keys.
ENVIRONMENT = ("HETRUN_SANDBOX", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ")
GRACE_S = 0.5  # from the end of the pipe to the end of the process
START_S = 10.0
PART = 1 << 20  # bytes that are received at once

T = TypeVar("T")


class ChildGone(Exception):
    """The process gives no answer; the text says why."""


class Child:
    """One life of the process. After anything but an answer it must be ended."""

    def __init__(self, code: str, purpose: str, library: str) -> None:
        """Begin to start it on `code`, in which {pipe} stands for its end of the pipe.

        `purpose` and `library`, a module that it needs, are for messages.
        """
        self._ready = False
        self._purpose, self._library = purpose, library
        seen = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        try:
            self._popen, self._socket = subprocesses.begin(code, subprocess.DEVNULL, seen, own_session=True)
        except OSError as error:
            raise HetrunError(f"no process for {purpose}: {error.strerror}") from error
        self.end = weakref.finalize(self, _end, self._popen, self._socket, os.getpid())
        self.began = monotonic()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        """End it from any thread; who waits for an answer hears that it is gone."""
        self._popen.kill()

    def wait_until_ready(self) -> None:
        """Until it says so, for a limited time since it began."""
        # What it said long ago may have been waiting since then.
        limit = self.limit(max(self.began + START_S - monotonic(), GRACE_S))
        try:
            if not self._ready:
                self._ready = self.receive(64, limit) == {"ready": True}
        except (EOFError, OSError, ValueError, RecursionError) as error:
            raise HetrunError(
                f"the process for {self._purpose} did not start ({type(error).__name__}, exit code "
                f"{self.exit_code()}); see whether this works: {sys.executable} -c 'import {self._library}'"
            ) from error

    def limit(self, seconds: float) -> TimeLimit:
        """A limit for what it does. That it waits for a core is not its fault: its time of computing has a
        limit of its own, inside."""
        return TimeLimit(seconds, self.pid)

    def send(self, data: bytes, limit: TimeLimit) -> None:
        """Send bytes; TimeoutError if they are not taken."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._within(partial(self._socket.send, rest), limit) :]

    def receive(self, most: int, limit: TimeLimit) -> object:
        """The next message, of at most `most` bytes."""
        size = length(self.read(HEAD.size, limit))
        if size > most:
            raise ValueError(f"{size} bytes")
        return json.loads(self.read(size, limit))

    def read(self, size: int, limit: TimeLimit) -> bytes:
        """`size` bytes; EOFError if it ends before."""
        parts = []
        while size:
            part = self._within(partial(self._socket.recv, min(size, PART)), limit)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _within(self, act: Callable[[], T], limit: TimeLimit) -> T:
        while True:
            self._socket.settimeout(limit.wait_s())  # which raises TimeoutError at the end
            with suppress(TimeoutError):
                return act()

    def exit_code(self) -> int:
        """How it ended; it is killed if it has not."""
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(GRACE_S)
        self._popen.kill()
        return self._popen.wait()


def computed_too_long(code: int) -> bool:
    """Whether the system ended it for that."""
    return code == -signal.SIGPROF


def _end(popen: subprocess.Popen[bytes], ours: socket.socket, owner: int) -> None:
    if os.getpid() == owner:  # a fork that ends leaves its parent's process alone
        popen.kill()
        popen.wait()
    ours.close()
