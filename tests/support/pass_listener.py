"""Tells a test of the passes that an executor runs."""

from __future__ import annotations

from collections.abc import Callable

from hetrun.backend import Pass
from hetrun.executor.compiled_plan import PassTiming
from hetrun.executor.pass_observer import PassObserver


class PassListener(PassObserver):
    """Calls functions of a test, and then the observer that was there before, if it is to hear, too."""

    def __init__(
        self,
        observe: Callable[[PassTiming], object] = lambda ran: None,
        prepare: Callable[[Pass], object] = lambda work: None,
        before: PassObserver | None = None,
    ) -> None:
        self._observe, self._prepare, self._before = observe, prepare, before

    def prepare(self, work: Pass) -> None:
        self._prepare(work)
        if self._before:
            self._before.prepare(work)

    def observe(self, ran: PassTiming) -> None:
        self._observe(ran)
        if self._before:
            self._before.observe(ran)
