"""Other programs that keep cores busy while something is measured.

Each is a process in a session of its own, like a program that another user started: a system that shares
time among sessions first gives it as much as it gives each side of a comparison. It ends when its pipe does,
and so with us, however we end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from subprocess import Popen

from hetrun.system import subprocesses

# A thread watches the pipe: it sleeps until no process holds the other end.
BUSY = """
import os, socket, threading
pipe = socket.socket(fileno={pipe})
pipe.send(b"!")
threading.Thread(target=lambda: (pipe.recv(1), os._exit(0)), daemon=True).start()
while True:
    pass
"""


@contextmanager
def others(n: int) -> Iterator[tuple[Popen[bytes], ...]]:
    """`n` of them run until the end."""
    with ExitStack() as stack:
        yield tuple(stack.enter_context(_other()) for _ in range(n))


@contextmanager
def _other() -> Iterator[Popen[bytes]]:
    process, pipe = subprocesses.begin(BUSY, out=2, own_session=True)
    try:
        with pipe:
            pipe.recv(1)  # it runs now
            yield process
    finally:
        process.kill()
        process.wait()
