"""How far something that takes time has come."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[float], None]


class MeasuringProgress(float):
    """A part that was reached by measuring, which is done once for each model."""


def stretch(progress: Progress | None, a: float, b: float, kind: type[float] = float) -> Progress:
    """Reports a part of a longer task, from a to b of it; does nothing without a callback."""
    return (lambda part: progress(kind(a + part * (b - a)))) if progress else (lambda part: None)
