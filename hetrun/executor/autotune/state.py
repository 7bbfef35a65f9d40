"""What a pilot remembers."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetrun.planner.online import Parts
from hetrun.planner.residency import Copy

LEAST_WAITING = 64  # tokens that are read in no time anyway


@dataclass(slots=True)
class Change:
    """One plan that took the place of another."""

    at: float
    reason: str


@dataclass(slots=True)
class State:
    """What changes while the model runs."""

    held: set[Copy]
    started: set[str]
    refused: set[str] = field(default_factory=set)  # backends that failed: not asked again
    parts: Parts = frozenset()  # weights besides those of whole units
    changes: list[Change] = field(default_factory=list)
    next_look: float = 0.0
    next_trial: float = 0.0
    asked: int = LEAST_WAITING  # tokens for which nothing was worth bringing in
    cause: str = ""  # of the last new plan, if nobody has looked since whether more weights would pay
