"""The backends that plans may use, without those that have failed."""

from __future__ import annotations

import logging
from collections import Counter

from hetrun.errors import HetrunError, PluginError
from hetrun.executor.autotune.active_plan import ActivePlan
from hetrun.executor.autotune.setup import Setup
from hetrun.executor.autotune.state import TuningState

log = logging.getLogger(__name__)


class BackendPool:
    """Says which backends are usable, and excludes one that fails."""

    def __init__(self, setup: Setup, state: TuningState, active_plan: ActivePlan) -> None:
        self.refused = set[str]()  # backends that failed: not asked again
        self._setup, self._state, self._active_plan = setup, state, active_plan

    def usable(self) -> list[str]:
        """All that plans may use, whether they have begun or not."""
        return [n for n in self._setup.candidates if n not in self.refused]

    def started(self) -> list[str]:
        """Of these, the ones whose libraries are loaded."""
        return [n for n in self.usable() if n in self._state.started]

    def not_started(self) -> list[str]:
        """Of these, the ones that would have to be brought in."""
        return [n for n in self.usable() if n not in self._state.started]

    def complete(self) -> list[str]:
        """Of these, the ones that hold all of the model."""
        n, counts = len(self._state.home), Counter(b for _, b in self._state.held)
        return [b for b in self.usable() if counts[b] == n]

    def is_home(self, name: str) -> bool:
        """Whether a backend holds a part of the model from the beginning: nothing goes on without it."""
        return name in self._setup.home.values()

    def exclude(self, name: str, error: Exception) -> None:
        """No plan uses this backend any more."""
        if not isinstance(error, PluginError):  # which has been reported already
            log.warning(
                "the backend %s is left out: %s", name, error, exc_info=not isinstance(error, HetrunError)
            )
        self.refused.add(name)
        self._active_plan.remove(lambda plan: any(backend == name for _, backend in plan.places))
        self._state.note(f"the backend {name} failed, so no plan uses it any more", "taken back")
