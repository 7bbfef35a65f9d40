"""What the parts of the autotuner share: where weights are, which backends have begun, what was decided."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from hetrun.planner.online import Parts
from hetrun.planner.residency import Copy

log = logging.getLogger(__name__)

MOST_CHANGES = 100  # that are remembered

Became = Literal["proposed", "in force", "taken back", "given back"]

LOGGED: Mapping[Became, str] = {  # how a line of the log begins
    "proposed": "plan on trial",
    "in force": "plan in force",
    "taken back": "plan withdrawn",
    "given back": "weights dropped",
}


@dataclass(slots=True)
class Change:
    """What was decided: a plan to try, what became of it, or memory that was given back."""

    at: float
    reason: str
    became: Became = "in force"


@dataclass(slots=True)
class TuningState:
    """What changes while the model runs."""

    home: frozenset[Copy]  # where each unit is from the beginning
    started: set[str]
    held: set[Copy] = field(init=False)
    parts: Parts = frozenset()  # weights besides those of whole units
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held = set(self.home)

    @property
    def copies(self) -> frozenset[Copy]:
        """Of weights, those that were brought in besides the home of their units."""
        return frozenset(self.held - self.home)

    def note(self, reason: str, became: Became = "in force") -> Change:
        """Record something that was decided just now."""
        change = Change(perf_counter(), reason, became)
        self.record(change)
        return change

    def record(self, change: Change) -> None:
        """Remember a change, and log it."""
        self.changes.append(change)
        del self.changes[:-MOST_CHANGES]
        log.info("%s: %s", LOGGED[change.became], change.reason)
