"""What reaches the engine thread: items of its inbox, and a gate for what must not wait in a queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hetrun.events import GenerateRequest
from hetrun.loaded import Loaded
from hetrun.model import Model
from hetrun.prepare import Prepared
from hetrun.scheduler import OnEvent

R = TypeVar("R")


@dataclass(slots=True)
class Job(Generic[R]):
    """A function to be called on the engine thread."""

    id: int
    work: Callable[[Loaded], R]
    done: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False  # nobody waits for it any more
    result: R | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A text to continue."""

    id: int
    request: GenerateRequest
    on_event: OnEvent
    arrived: float


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that waited for its text or its grammar has it, or cannot have it."""

    id: int
    prepared: Prepared | Exception


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request that is to end."""

    id: int


class Close:
    """The engine is to end."""


Item = Job[Any] | Request | Ready | Cancel | Close


class Gate:
    """What other threads and the engine thread must see in the same order: what runs, and what is to end."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stopped = False
        self.model: Model | None = None
        self._busy: frozenset[int] = frozenset()  # the requests or the job that are in the model now
        self._cancelled: set[int] = set()  # those whose cancel lies in the inbox

    @property
    def busy(self) -> bool:
        """Whether something is in the model now."""
        return bool(self._busy)

    def cancel(self, id: int) -> None:
        """With the lock: end what runs if it is this one."""
        self._cancelled.add(id)
        if id in self._busy and self.model:
            self.model.cancel()

    def stop(self) -> None:
        """With the lock: end what runs, and let nothing else begin."""
        self.stopped = True
        if self._busy and self.model:
            self.model.cancel()

    def forget(self, id: int) -> None:
        """A cancel was taken out of the inbox."""
        with self.lock:
            self._cancelled.discard(id)

    def enter(self, ids: frozenset[int]) -> bool:
        """Begin to compute for these; False if one of them was cancelled meanwhile, or all is stopped."""
        with self.lock:
            if self.stopped or self.model is None or not self._cancelled.isdisjoint(ids):
                return False
            self.model.rearm()  # a cancel that came for the last ones too late
            self._busy = ids
            return True

    def leave(self) -> None:
        """It is computed: a cancel does not reach the model any more."""
        with self.lock:
            self._busy = frozenset()
