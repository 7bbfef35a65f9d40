"""Exponential moving averages."""

from __future__ import annotations


def smoothed(before: float | None, now: float, share: float) -> float:
    """A mean in which the newest value has this share; the first one has all of it."""
    return now if before is None else before + share * (now - before)
