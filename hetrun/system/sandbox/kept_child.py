"""A child process that is kept from one question to the next, and started again when it is gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from hetrun.errors import EngineStopped, HetrunError
from hetrun.system.sandbox.child import Child, ChildGone

C = TypeVar("C", bound=Child)
A = TypeVar("A")


class KeptChild(Generic[C]):
    """The child of one owner. Any thread may ask; one question is answered at a time."""

    def __init__(self, start: Callable[[], C], purpose: str) -> None:
        """`purpose`: what the questions are for, in the message to those that come when it is closed."""
        self._start, self._purpose = start, purpose
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self.child: C | None = None

    @property
    def pid(self) -> int | None:
        """The process, where one runs."""
        return self.child.pid if self.child and self.child.end.alive else None

    def warm(self) -> None:
        """Start it without waiting until it is ready, so that the first question need not."""
        with self._lock:
            self._running()

    def ask(self, question: Callable[[C], A]) -> A:
        """What `question` makes of the child. One that raises ends it: an answer may still come, and would be
        taken for the next one's. Where the answer makes the child useless, `question` ends it itself."""
        with self._lock:
            child = self._running()
            try:
                return question(child)
            except BaseException as error:
                self._end()
                if self._closed and isinstance(error, ChildGone | HetrunError):
                    raise EngineStopped(f"the model was closed before {self._purpose}") from None
                raise

    def close(self) -> None:
        """End it, also while it is asked. A fork leaves its parent's child alone."""
        if os.getpid() != self._owner:
            return
        self._closed = True
        if child := self.child:
            child.kill()
        with self._lock:
            self._end()

    def _running(self) -> C:
        if self._closed:
            raise EngineStopped("the model was closed; open it again with LLM(...)")
        if self.child is None or not self.child.end.alive or not self.child.alive:
            self._end()
            self.child = self._start()
        return self.child

    def _end(self) -> None:
        if self.child:
            self.child.end()
        self.child = None
