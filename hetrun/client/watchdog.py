"""In the engine's process: notices a step that does not end, and says that the process is alive.

A model computes on all cores, so the thread sleeps nearly always. What it cannot notice, because it does not
even run (the process was stopped, or a native call keeps the interpreter lock), the parent notices: no pulse.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
from collections.abc import Callable
from time import perf_counter

from hetrun.client.events import Doing
from hetrun.client.wire_protocol import ASK_FOR_STACKS, Message, Patience, Pulse, Stuck, Unstuck

log = logging.getLogger(__name__)


def write_stacks() -> None:
    """From now on stacks go to stderr: of a thread that crashes, and of all when the process is asked.

    It is asked by a signal, whose handler needs no interpreter lock. To look at threads that run may crash.
    """
    faulthandler.enable(all_threads=False)
    faulthandler.register(ASK_FOR_STACKS, all_threads=True)


class Watchdog:
    """Compares how long the engine's step takes with what was predicted for it."""

    def __init__(
        self,
        doing: Callable[[], Doing | None],
        patience: Patience,
        tell: Callable[[Message], None],
        pulse: Callable[[], Pulse] = Pulse,
    ) -> None:
        """`doing`: what the engine is in the middle of; `pulse`: what is said at each look."""
        self._doing = doing
        self._pulse = pulse
        self._patience = patience
        self._tell = tell
        self._since: float | None = None  # which step it looks at
        self._watched = 0.0  # seconds that it has looked at it
        self._stuck = False

    def run(self, closed: threading.Event) -> None:
        """Look once in a while, until it is closed."""
        last = perf_counter()
        while not closed.wait(self._patience.look):
            now = perf_counter()
            self.look(now - last)
            last = now

    def look(self, elapsed: float) -> None:
        """`elapsed` seconds after the last look."""
        self._tell(self._pulse())
        doing = self._doing()
        since = doing.since if doing else None
        if doing is None or since != self._since:
            self._since, self._watched = since, 0.0
            self._well()
            return
        # Counted here and not since the step began: a process that was stopped for an hour has not computed.
        self._watched += min(elapsed, 2 * self._patience.look)
        limit = self._patience.limit(doing.expected_s)
        if self._watched > limit:
            self._ill(Stuck(doing.what, self._watched, doing.expected_s, limit))

    def _ill(self, stuck: Stuck) -> None:
        if not self._stuck:
            self._stuck = True
            expected = "nothing is" if stuck.expected_s is None else f"{stuck.expected_s:.3g} s were"
            log.warning(
                "a step takes %.1f s already, %s expected; in %s. Where all threads are:",
                *(stuck.seconds, expected, stuck.what or "no segment"),
            )
            faulthandler.dump_traceback(all_threads=True)
        self._tell(stuck)

    def _well(self) -> None:
        if self._stuck:
            self._stuck = False
            log.warning("the step has ended after all")
            self._tell(Unstuck())
