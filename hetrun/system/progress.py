"""How far something that takes time has come."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[float], None]


def stretch(progress: Progress | None, a: float, b: float) -> Progress:
    """Reports a part of a longer task, from a to b of it; does nothing without a callback."""
    return (lambda part: progress(a + part * (b - a))) if progress else (lambda part: None)
