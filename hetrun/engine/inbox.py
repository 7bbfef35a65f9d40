"""What reaches the engine thread: the items of its inbox, and how they are read."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, TypeVar

from hetrun.engine.cancellation import Gate
from hetrun.engine.input_processor import PreparedInput
from hetrun.engine.loaded_model import LoadedModel
from hetrun.engine.request import ActiveRequest
from hetrun.errors import EngineStopped, system_fault

R = TypeVar("R")


@dataclass(slots=True)
class Job(Generic[R]):
    """A function to be called on the engine thread."""

    id: int
    work: Callable[[LoadedModel], R]
    done: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False  # its caller does not wait any more
    result: R | None = None
    error: BaseException | None = None

    def run(self, loaded: LoadedModel, gate: Gate) -> None:
        """Call the function, unless it was abandoned or all is stopped, and wake its caller."""
        if not self.abandoned and gate.enter(frozenset((self.id,))):
            try:
                self.result = self.work(loaded)
            except BaseException as e:
                self.error = system_fault("the model did not do what it was asked for", e) or e
            finally:
                gate.leave()
        else:
            self.error = EngineStopped("the model was closed before this request was processed")
        self.done.set()


class SideJob(Job[R]):
    """One that does nothing to the model, and can be called while a pass stands aside."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that waited for its text or its grammar has it, or cannot have it."""

    id: int
    prepared: PreparedInput | Exception


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request that is to end."""

    id: int


class Close:
    """The engine is to end."""


Item = Job[Any] | ActiveRequest | Ready | Cancel | Close
Handler = Callable[[Item], bool]  # False: the engine is to end


class InboxReader:
    """Reads the inbox on the engine's thread. While a long pass stands aside, items that cannot be handled
    meanwhile are deferred: they come first when the pass is over."""

    def __init__(self, items: queue.SimpleQueue[Item]) -> None:
        self._items = items
        self._deferred: deque[Item] = deque()

    @property
    def has_deferred(self) -> bool:
        """Whether items wait for the end of a pass."""
        return bool(self._deferred)

    @property
    def has_arrivals(self) -> bool:
        """Whether something came in that was not read yet."""
        return not self._items.empty()

    def get(self, timeout: float | None) -> Item:
        """Wait for the next item; raises queue.Empty if none came in time."""
        return self._items.get(timeout=timeout)

    def put(self, item: Item) -> None:
        """Add an item; from any thread."""
        self._items.put(item)

    def read_deferred(self, handle: Handler) -> bool:
        """Handle the deferred items. False: close."""
        while self._deferred:
            if not handle(self._deferred.popleft()):
                return False
        return True

    def read(self, handle: Handler) -> bool:
        """Handle what came in so far. False: close."""
        # Not until the inbox is empty: others may fill it as fast as it is emptied.
        return all(handle(self._items.get()) for _ in range(self._items.qsize()))

    def read_aside(self, handle: Handler, standing: Collection[int]) -> None:
        """Handle what can be handled while a pass of the requests `standing` stands aside; defer the rest."""
        for _ in range(self._items.qsize()):
            item = self._items.get()
            busy = isinstance(item, (Job, Close)) and not isinstance(item, SideJob)
            if busy or (isinstance(item, Cancel) and item.id in standing):
                self._deferred.append(item)
            else:
                handle(item)

    def abort(self, reject: Callable[[ActiveRequest], object], reason: EngineStopped) -> None:
        """End all items: nothing is handled any more."""
        while self._deferred or not self._items.empty():
            item = self._deferred.popleft() if self._deferred else self._items.get()
            if isinstance(item, ActiveRequest):
                reject(item)
            elif isinstance(item, Job):
                item.error = reason
                item.done.set()


class EngineCalls:
    """Calls functions on the engine's thread, between two steps, for the threads that prepare requests."""

    def __init__(self, items: queue.SimpleQueue[Item], gate: Gate) -> None:
        self._items = items
        self._gate = gate
        self._ids = count(-1, -1)  # which no other item has

    def __call__(self, work: Callable[[], R]) -> R:
        """Call a function there, and wait for what it returns."""
        job = Job(next(self._ids), lambda _: work())
        with self._gate.lock:  # so that nothing comes in after the thread's last look
            if self._gate.stopped:
                raise EngineStopped("the model was closed before the pictures were read")
            self._items.put(job)
        job.done.wait()
        if job.error:
            raise job.error
        return job.result  # type: ignore[return-value]  # set when there is no error
