"""How far something that takes time has come."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[float], None]


def stretch(progress: Progress | None, a: float, b: float) -> Progress:
    """The part of a longer way from a to b; to nobody where nobody wants to hear."""
    return (lambda part: progress(a + part * (b - a))) if progress else (lambda part: None)
