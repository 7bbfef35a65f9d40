"""Where the time inside a backend goes: seconds by kind of work, booked only while a profile is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

# What the time of a segment is spent on; `other` is what only reads and writes: rope, gates, sums, copies.
Activity = Literal["products", "attention", "norms", "other"]
ACTIVITIES: tuple[Activity, ...] = ("products", "attention", "norms", "other")

_OF_KIND: Mapping[str, Activity] = {
    **dict.fromkeys(("linear", "head", "moe"), "products"),
    **dict.fromkeys(("rms_norm", "layer_norm"), "norms"),
    "attention": "attention",
}


def activity(kind: str) -> Activity:
    """What an op of this kind is booked as."""
    return _OF_KIND.get(kind, "other")


class ActivityTimes:
    """Seconds of each activity. Only the engine's thread adds to it."""

    def __init__(self) -> None:
        self.seconds: dict[Activity, float] = dict.fromkeys(ACTIVITIES, 0.0)
        self.looking = 0.0  # seconds that the looking itself took, in none of the others

    def add(self, what: Activity, seconds: float) -> None:
        """Something was done for so long."""
        self.seconds[what] += seconds

    @property
    def total(self) -> float:
        """Seconds of all activities."""
        return sum(self.seconds.values())
