"""A gate for what must not wait in a queue: requests that are to end, and the end of the engine."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from hetrun.client.events import CurrentStep
from hetrun.executor.interface import Model


class Stoppable(Protocol):
    """What computes beside the model."""

    def cancel(self) -> None:
        """End what runs; from any thread."""
        ...

    def rearm(self) -> None:
        """Let the next thing run."""
        ...


@dataclass(slots=True)
class Frame:
    """A step or a job that has begun. A step may run inside another one that stands aside."""

    ids: frozenset[int]  # the requests or the job
    since: float
    expected_s: float | None
    what: str = ""  # what runs, where it is not the model


SOON_S = 0.04  # what ends so soon anyway is not worth ending early, for all who are in it


class Gate:
    """What other threads and the engine thread must see in the same order: what runs, and what is to end."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stopped = False
        self._model: Model | None = None
        self._beside: Stoppable | None = None
        self._frames: list[Frame] = []  # what is in the model now, the innermost last
        self._cancelled: set[int] = set()  # those whose cancel lies in the inbox

    def open(self, model: Model, beside: Stoppable | None = None) -> None:
        """Let computations begin: those of a model, and of what computes beside it."""
        self._model, self._beside = model, beside

    def release(self) -> None:
        """Forget the model: nothing begins any more, and the gate does not keep its memory."""
        self._model = self._beside = None

    @property
    def busy(self) -> bool:
        """Whether something is in the model now."""
        return bool(self._frames)

    @property
    def doing(self) -> CurrentStep | None:
        """What the engine thread is in the middle of; None: it waits, or is between two things."""
        with self.lock:
            frame = self._frames[-1] if self._frames else None
        if frame is None or self._model is None:
            return None
        what = frame.what or self._model.segment
        return CurrentStep(frame.since, frame.expected_s, what, self._model.stats.segments)

    def cancel(self, id: int) -> None:
        """With the lock: end what runs if it is this one."""
        self._cancelled.add(id)
        for frame in self._frames:
            if id in frame.ids and self._over(frame):
                self._end()

    def stop(self) -> None:
        """With the lock: end what runs, and let nothing else begin."""
        self.stopped = True
        if self._frames:
            self._end()

    def forget(self, id: int) -> None:
        """A cancel was taken out of the inbox."""
        with self.lock:
            self._cancelled.discard(id)

    def enter(self, ids: frozenset[int], expected_s: float | None = None, what: str = "") -> bool:
        """Begin to compute for these; False if one of them was cancelled meanwhile, or all is stopped.

        `expected_s`: the seconds that it takes, if known; `what`: its name, where it is not the model's.
        """
        with self.lock:
            if self.stopped or self._model is None or not self._cancelled.isdisjoint(ids):
                return False
            self._rearm()  # a cancel that came for the last ones too late
            self._frames.append(Frame(ids, perf_counter(), expected_s, what))
            return True

    def leave(self) -> None:
        """It is computed: a cancel does not reach the model any more."""
        with self.lock:
            ended = self._frames.pop()
            if self._frames:
                self._frames[-1].since += perf_counter() - ended.since
            # The one around it goes on, unless it is to end itself; so does what the model does by itself.
            over = self._over(self._frames[-1]) if self._frames else self.stopped
            if not over:
                self._rearm()

    @property
    def must_end(self) -> bool:
        """Whether the innermost step is for a request that was cancelled, or all is stopped."""
        with self.lock:
            return self._over(self._frames[-1]) if self._frames else self.stopped

    def _end(self) -> None:
        for each in (self._model, self._beside):
            if each:
                each.cancel()

    def _rearm(self) -> None:
        for each in (self._model, self._beside):
            if each:
                each.rearm()

    def _over(self, frame: Frame) -> bool:
        if self.stopped:
            return True
        return not self._cancelled.isdisjoint(frame.ids) and (len(frame.ids) == 1 or not _ends_soon(frame))


def _ends_soon(frame: Frame) -> bool:
    """Whether a step for several will be over about as soon as it could be ended."""
    return frame.expected_s is not None and frame.since + frame.expected_s < perf_counter() + SOON_S
