"""Upkeep of the model between steps and in idle time: tending it, and giving memory back."""

from __future__ import annotations

import queue
from collections.abc import Callable
from time import perf_counter

from hetrun.engine.inbox import Handler, InboxReader
from hetrun.engine.pictures.store import PictureStore
from hetrun.errors import Cancelled
from hetrun.executor.interface import Model
from hetrun.executor.steps import Between

SETTLED_S = 0.05  # without work: no further request was about to come
TENDED_S = 5.0  # between two looks after the model, while long passes run
REST_S = 2.0  # without work
LOOK_S = 0.5  # between two looks after the model, while there is work now and then


class ModelUpkeep:
    """Lets the model prepare for what comes. Work that takes long calls `between` in its middle."""

    def __init__(self, model: Model, pictures: PictureStore | None) -> None:
        self._model = model
        self._pictures = pictures
        self._tended = 0.0

    def expect(self, missing: int, between: Between) -> None:
        """Prepare for the tokens of new requests."""
        try:
            self._model.expect(missing, between)
        except Cancelled:
            pass  # all is stopped, as the inbox says

    def tend(self, *, idle: bool, stood_aside: bool, between: Between) -> None:
        """Look after the model between two steps. Nothing may wait for that: no answer that is due after a
        pass that stood aside, nor, when nothing runs, the next request."""
        rest = TENDED_S if stood_aside else LOOK_S if idle else 0.0
        if perf_counter() > self._tended + rest:
            self._look_after(idle, between)
            if self._pictures:
                self._pictures.rest()
            self._tended = perf_counter()

    def wait(
        self, inbox: InboxReader, handle: Handler, is_idle: Callable[[], bool], between: Between
    ) -> bool:
        """Wait for the next item; meanwhile the model is tended, and in the end memory given back. False:
        close."""
        try:
            return handle(inbox.get(SETTLED_S))
        except queue.Empty:
            self._look_after(True, between)
        if not is_idle():
            return True  # something came meanwhile
        try:
            return handle(inbox.get(REST_S))
        except queue.Empty:
            self._model.rest()
        try:
            return handle(inbox.get(self._pictures.rest() if self._pictures else None))
        except queue.Empty:
            return True  # the encoder goes when it has not been needed for long enough

    def _look_after(self, idle: bool, between: Between) -> None:
        try:
            self._model.tend(idle, between)
        except Cancelled:
            pass  # all is stopped, as the inbox says
