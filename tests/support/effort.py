"""How much work something is, in calls: the same number however fast or busy the machine is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class Effort:
    """What was counted so far."""

    calls: int = 0


@contextmanager
def effort() -> Iterator[Effort]:
    """Count the functions that this thread calls, those in C included."""
    counted = Effort()

    def count(frame: FrameType, event: str, arg: object) -> None:
        counted.calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield counted
    finally:
        sys.setprofile(before)
