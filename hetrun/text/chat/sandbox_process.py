"""The child process from outside: started, asked, given up."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

from hetrun.errors import HetrunError
from hetrun.system import subprocesses
from hetrun.text.chat import limits
from hetrun.text.chat.framing import HEAD, framed, length

CHILD = "from hetrun.text.chat.sandbox_main import main; main({pipe})"
# All that the child sees of our environment, which may hold keys.
ENVIRONMENT = ("LD_LIBRARY_PATH", "PYTHONHOME", "TZ")
GRACE_S = 0.5  # from the end of the pipe to the end of the process


class Gone(Exception):
    """The process gives no answer; the text says why."""


class Process:
    """One life of the child. After anything but an answer it must be ended."""

    def __init__(self, sources: Sequence[str]) -> None:
        """Begin to start it; it reads its templates when it has come so far."""
        self._ready = False
        seen = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        try:
            self._popen, self._socket = subprocesses.begin(CHILD, subprocess.DEVNULL, seen, own_session=True)
        except OSError as error:
            raise HetrunError(f"no process for chat templates: {error.strerror}") from error
        self.end = weakref.finalize(self, _end, self._popen, self._socket, os.getpid())
        self._began = monotonic()
        with suppress(OSError):  # who waits for it to be ready hears what happened
            self._send(framed(sources), self._began + limits.START_S)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        """End it from any thread; whoever waits for an answer hears that it is gone."""
        self._popen.kill()

    def ask(self, request: bytes, most: int) -> object:
        """The answer to a request, of at most so many bytes. It may be anything: a stranger speaks."""
        self._wait_until_ready()
        end = monotonic() + limits.WALL_PER_CPU * limits.seconds(len(request))
        try:
            self._send(request, end)
            return self._receive(most, end)
        except TimeoutError:
            raise Gone(limits.TOO_LONG) from None
        except (EOFError, OSError):
            raise Gone(_obituary(self._exit_code())) from None
        except (ValueError, RecursionError):
            raise Gone("its process sent an unreadable answer") from None

    def _wait_until_ready(self) -> None:
        # What it said long ago may have been waiting since then.
        end = max(self._began + limits.START_S, monotonic() + GRACE_S)
        try:
            if not self._ready:
                self._ready = self._receive(64, end) == {"ready": True}
        except (EOFError, OSError, ValueError, RecursionError) as error:
            raise HetrunError(
                f"the process for chat templates did not start ({type(error).__name__}, exit code "
                f"{self._exit_code()}); see whether this works: {sys.executable} -c 'import jinja2.sandbox'"
            ) from error

    def _send(self, data: bytes, end: float) -> None:
        self._socket.settimeout(_left(end))
        self._socket.sendall(data)

    def _receive(self, most: int, end: float) -> object:
        size = length(self._read(HEAD.size, end))
        if size > most:
            raise ValueError(f"{size} bytes")
        return json.loads(self._read(size, end))

    def _read(self, size: int, end: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self._socket.settimeout(_left(end))
            part = self._socket.recv(min(size - len(parts), limits.MIB))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def _exit_code(self) -> int:
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(GRACE_S)
        self._popen.kill()
        return self._popen.wait()


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


def _obituary(code: int) -> str:
    if code in (limits.NO_TIME, -signal.SIGPROF):
        return limits.TOO_LONG
    if code == limits.NO_MEMORY:
        return limits.TOO_LARGE
    return f"its process {subprocesses.ending(code)}"
