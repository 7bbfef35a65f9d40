"""How many cores other programs keep busy, and whether that has changed since threads were chosen."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from hetrun.executor.autotune.decisions import TAKEN

LOOK_S = 0.5  # between two looks
SOON_S = 0.1  # the same where nothing is known but how it was a while ago
BLIND_S = 30.0  # how long the times of threads are believed, where it is unknown what other programs do

Look = Callable[[float], float | None]  # how many cores others kept busy since it was called last


class CrowdWatch:
    """Looks at other programs between steps; belongs to the engine's thread."""

    def __init__(self, look: Look) -> None:
        self.others: float | None = None  # cores that other programs keep busy
        self.is_unsettled = False  # that has changed, or may have, and nothing has shown what that means
        self.has_changed = False  # since threads were chosen, as the last look says
        self.looks = 0
        self._look, self._next_look, self._reference = look, 0.0, 0.0
        self._settled, self._begun = perf_counter(), False

    @property
    def crowded(self) -> bool:
        """Whether others take cores of ours, as far as we know."""
        return self.others is not None and self.others > TAKEN

    @property
    def quiet(self) -> bool:
        """Whether it is sure that no other program computes."""
        return self.others is not None and self.others <= TAKEN

    def settle(self) -> None:
        """Threads have been chosen for the machine as it is now."""
        self._settled = perf_counter()
        self.is_unsettled, self._begun = False, self.looks == 0

    def observe_pass(self) -> None:
        """A pass ran: where it is unknown what others do, passes do not show it either."""
        self.is_unsettled = self.is_unsettled and self.others is None

    def look(self, at: float, rested: bool) -> bool:
        """Look if it is time to; whether it was. `rested`: nothing may have run for long, and what others did
        meanwhile says nothing about now."""
        if rested and self.others is not None and at > self._next_look + LOOK_S:
            self._look(at)
            self._next_look = at + SOON_S
        if at < self._next_look:
            return False
        self._next_look = at + LOOK_S
        self.others, self.has_changed = self._look(at), False
        self.looks += 1
        if self.others is None:
            self.is_unsettled = self.is_unsettled or at > self._settled + BLIND_S
            return True
        if self._begun:  # threads were tried in the same crowd, a moment ago
            self._begun, self._reference = False, self.others
        if abs(self.others - self._reference) >= TAKEN:
            self._reference, self.is_unsettled, self.has_changed = self.others, True, True
        return True
