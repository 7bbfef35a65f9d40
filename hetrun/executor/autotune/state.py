"""What a pilot remembers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hetrun.planner.online import Parts
from hetrun.planner.residency import Copy

LEAST_WAITING = 64  # tokens that are read in no time anyway


Became = Literal["proposed", "in force", "taken back", "given back"]


@dataclass(slots=True)
class Change:
    """What was decided: a plan to try, what became of it, or memory that was given back."""

    at: float
    reason: str
    became: Became = "in force"


@dataclass(slots=True)
class State:
    """What changes while the model runs."""

    held: set[Copy]
    started: set[str]
    refused: set[str] = field(default_factory=set)  # backends that failed: not asked again
    unused: dict[Copy, float] = field(default_factory=dict)  # copies that do not pay, and since when
    parts: Parts = frozenset()  # weights besides those of whole units
    changes: list[Change] = field(default_factory=list)
    next_look: float = 0.0
    next_trial: float = 0.0
    idle_at: float = -1e9  # when the engine was idle the last time
    next_refining: float = 0.0
    news: str = ""  # that make another plan likely
    trying_s: float = 0.0  # that the comparison has taken which goes on
    rest: float = 0.5  # between two trials: longer and longer while nothing is new
    asked: int = LEAST_WAITING  # tokens for which nothing was worth bringing in
    cause: str = ""  # of the last new plan, if it was not checked since whether more weights would pay
    next_bringing: float = 0.0  # seconds of passes after which it is seen what would have paid
    hesitation: float = 1.0  # how much more must have been lost for that: more each time that copies went
