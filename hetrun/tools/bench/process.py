"""Processes that are measured: each is told one thing at a time over a pipe, and ends when its pipe does."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from hetrun.errors import HetrunError
from hetrun.memory.ledger import strangers
from hetrun.system import subprocesses

GRACE_S = 5.0
T = TypeVar("T")
Answers = Callable[[object], Iterable[object]]


class BenchProcessDied(HetrunError):
    """A process ended in the middle of its work."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"the process of {name} {subprocesses.ending(code)} in the middle of its work")
        self.name, self.code = name, code

    def __reduce__(self) -> tuple[type[BenchProcessDied], tuple[str, int]]:
        return (type(self), (self.name, self.code))


class BenchProcess:
    """This side of the pipe."""

    def __init__(self, name: str, code: str, prefix: Sequence[str] = ()) -> None:
        """A fresh interpreter on `code`, where {pipe} stands for its end of the pipe. `prefix` is a command
        that runs it; `name` is for people."""
        self.name = name
        # In a session of its own: it shall not hear Ctrl-C before we do.
        self._process, ours = subprocesses.begin(code, out=2, own_session=True, prefix=prefix)
        strangers.add(self.pid)  # to count the memory of one that maps a large model takes milliseconds
        self._pipe = Connection(ours.detach())
        _as_important_as_we(self._process.pid)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def ask(self, order: object, kind: type[T]) -> T:
        """What it answers; an error that it answers is raised."""
        self.send(order)
        return self.receive(kind)

    def send(self, order: object) -> None:
        """Tell it something."""
        try:
            self._pipe.send(order)
        except OSError:
            raise self._death() from None

    def receive(self, kind: type[T]) -> T:
        """Its next answer."""
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(answer, Exception):
            raise answer
        if not isinstance(answer, kind):
            raise HetrunError(f"{self.name} answered {answer!r}")
        return answer

    def _death(self) -> BenchProcessDied:
        return BenchProcessDied(self.name, self._process.wait())

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        strangers.discard(self.pid)


def _as_important_as_we(pid: int) -> None:
    """Linux shares time among sessions, and ours may have been given more or less of it than is usual: what
    is measured gets the same."""
    with suppress(OSError, IndexError):
        ours = Path("/proc/self/autogroup").read_text(encoding="ascii")
        Path(f"/proc/{pid}/autogroup").write_text(ours.split("nice")[1].strip(), encoding="ascii")


def obey(descriptor: int, name: str, answers: Answers) -> None:
    """The other side's whole life: send back what is answered to each order, or the error that ended it."""
    pipe = Connection(descriptor)
    try:
        while True:
            for answer in _said(name, answers, pipe.recv()):
                pipe.send(answer)
    except (EOFError, OSError):
        return


def _said(name: str, answers: Answers, order: object) -> Iterator[object]:
    try:
        yield from answers(order)
    except Exception as error:
        # Whatever it is, the other side must hear of it: it waits.
        known = isinstance(error, HetrunError)
        yield error if known else HetrunError(f"the process of {name}: {type(error).__name__}: {error}")
