"""In the engine's process: detects a step that makes no progress, and sends a pulse.

A model computes on all cores, so this thread nearly always sleeps. If it cannot run at all (the process was
stopped, or a native call holds the interpreter lock), the parent notices the missing pulse.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
from collections.abc import Callable
from time import perf_counter

from hetrun.client.events import CurrentStep
from hetrun.client.wire_protocol import ASK_FOR_STACKS, Message, Patience, Pulse, StepResumed, StepStalled
from hetrun.system.run_queue import RunQueue, Standstill

log = logging.getLogger(__name__)


def write_stacks() -> None:
    """Write stacks to stderr: of a thread that crashes, and of all threads after a signal.

    The signal's handler needs no interpreter lock. Inspecting running threads may crash.
    """
    faulthandler.enable(all_threads=False)
    faulthandler.register(ASK_FOR_STACKS, all_threads=True)


class Watchdog:
    """Compares the time without progress in the engine's step with the predicted time of the whole step.

    If other programs use the cores, it waits longer, for as long as our threads waited for a core.
    """

    def __init__(
        self,
        doing: Callable[[], CurrentStep | None],
        patience: Patience,
        tell: Callable[[Message], None],
        pulse: Callable[[], Pulse] = Pulse,
        queue: RunQueue | None = None,
    ) -> None:
        """`doing`: returns the step being computed; `pulse`: called at each look; `queue`: returns how long
        our threads waited for cores."""
        self._doing = doing
        self._pulse = pulse
        self._patience = patience
        self._tell = tell
        self._at: tuple[float, str, int] | None = None  # the observed step, and its progress
        self._still = Standstill(queue or RunQueue(os.getpid()), patience.busy)
        self._busy = self._stuck = False  # what was reported

    def run(self, closed: threading.Event) -> None:
        """Look from time to time, until it is closed."""
        last = perf_counter()
        while not closed.wait(self._patience.look):
            now = perf_counter()
            self.look(now - last)
            last = now

    def look(self, elapsed: float) -> None:
        """`elapsed` seconds after the last look."""
        self._tell(self._pulse())
        doing = self._doing()
        at = (doing.since, doing.what, doing.segments) if doing else None
        if doing is None or at != self._at:
            self._at, self._busy = at, False
            self._still.begin()
            self._well()
            return
        # Counted here, not since the step began: a process that was stopped for an hour has not computed.
        self._still.add(min(elapsed, 2 * self._patience.look))
        seconds, limit = self._still.seconds, self._patience.limit(doing.expected_s)
        stretched = limit * self._still.stretch
        if seconds > stretched:
            self._ill(StepStalled(doing.what, seconds, doing.expected_s, stretched))
        elif seconds > limit:
            self._slow(doing, seconds)

    def _slow(self, doing: CurrentStep, seconds: float) -> None:
        if not self._busy:
            self._busy = True
            log.debug(
                "the machine is busy: a step has been in %s for %.1f s, %s expected; its threads are "
                "waiting for cores",
                doing.what or "no segment",
                seconds,
                _expected(doing.expected_s),
            )

    def _ill(self, stuck: StepStalled) -> None:
        if not self._stuck:
            self._stuck = True
            log.warning(
                "a step is stuck: it has been in %s for %.1f s, %s expected. Stacks of all threads:",
                stuck.what or "no segment",
                stuck.seconds,
                _expected(stuck.expected_s),
            )
            faulthandler.dump_traceback(all_threads=True)
        self._tell(stuck)

    def _well(self) -> None:
        if self._stuck:
            self._stuck = False
            log.warning("the step is no longer stuck")
            self._tell(StepResumed())


def _expected(seconds: float | None) -> str:
    return "nothing is" if seconds is None else f"{seconds:.3g} s were"
