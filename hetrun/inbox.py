"""What reaches the engine thread: items of its inbox, and a gate for what must not wait in a queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
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


@dataclass(frozen=True, slots=True)
class Doing:
    """What the engine thread is in the middle of."""

    since: float  # perf_counter
    expected_s: float | None  # None: nobody knows
    what: str


class Gate:
    """What other threads and the engine thread must see in the same order: what runs, and what is to end."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stopped = False
        self.model: Model | None = None
        self._began = 0.0  # when the thread went into the model
        self._expected: float | None = None
        self._busy: frozenset[int] = frozenset()  # the requests or the job that are in the model now
        self._cancelled: set[int] = set()  # those whose cancel lies in the inbox

    @property
    def busy(self) -> bool:
        """Whether something is in the model now."""
        return bool(self._busy)

    @property
    def doing(self) -> Doing | None:
        """What the engine thread is in the middle of; None: it waits, or is between two things."""
        model, began = self.model, self._began
        return Doing(began, self._expected, model.segment) if began and model else None

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

    def enter(self, ids: frozenset[int], expected: float | None = None) -> bool:
        """Begin to compute for these; False if one of them was cancelled meanwhile, or all is stopped.

        `expected`: the seconds that it takes, where somebody knows.
        """
        with self.lock:
            if self.stopped or self.model is None or not self._cancelled.isdisjoint(ids):
                return False
            self.model.rearm()  # a cancel that came for the last ones too late
            self._busy = ids
            self._began, self._expected = perf_counter(), expected
            return True

    def leave(self) -> None:
        """It is computed: a cancel does not reach the model any more."""
        with self.lock:
            self._busy = frozenset()
            self._began = 0.0
