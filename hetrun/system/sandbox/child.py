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
from contextlib import suppress
from time import monotonic

from hetrun.errors import HetrunError
from hetrun.system import subprocesses
from hetrun.system.sandbox.framing import HEAD, length

# All that the child sees of our environment, which may hold keys.
ENVIRONMENT = ("HETRUN_SANDBOX", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ")
GRACE_S = 0.5  # from the end of the pipe to the end of the process
START_S = 10.0  # by the clock on the wall: the machine may be busy
PART = 1 << 20  # bytes that are received at once


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
        end = max(self.began + START_S, monotonic() + GRACE_S)
        try:
            if not self._ready:
                self._ready = self.receive(64, end) == {"ready": True}
        except (EOFError, OSError, ValueError, RecursionError) as error:
            raise HetrunError(
                f"the process for {self._purpose} did not start ({type(error).__name__}, exit code "
                f"{self.exit_code()}); see whether this works: {sys.executable} -c 'import {self._library}'"
            ) from error

    def send(self, data: bytes, end: float) -> None:
        """Send bytes until a time of `monotonic`."""
        self._socket.settimeout(_left(end))
        self._socket.sendall(data)

    def receive(self, most: int, end: float) -> object:
        """The next message, of at most `most` bytes."""
        size = length(self.read(HEAD.size, end))
        if size > most:
            raise ValueError(f"{size} bytes")
        return json.loads(self.read(size, end))

    def read(self, size: int, end: float) -> bytes:
        """`size` bytes; EOFError if it ends before."""
        parts = []
        while size:
            self._socket.settimeout(_left(end))
            part = self._socket.recv(min(size, PART))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def exit_code(self) -> int:
        """How it ended; it is killed if it has not."""
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(GRACE_S)
        self._popen.kill()
        return self._popen.wait()


def computed_too_long(code: int) -> bool:
    """Whether the system ended it for that."""
    return code == -signal.SIGPROF


def _left(end: float) -> float:
    left = end - monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _end(popen: subprocess.Popen[bytes], ours: socket.socket, owner: int) -> None:
    if os.getpid() == owner:  # a fork that ends leaves its parent's process alone
        popen.kill()
        popen.wait()
    ours.close()
