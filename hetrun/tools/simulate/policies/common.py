"""What the policies share: all on one side, whole layers on the GPU, and the most of something that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hetrun.tools.simulate.evaluator import StepCosts, fits
from hetrun.tools.simulate.types import Band, PolicyPlacement, Shares

T = TypeVar("T")


def every(clock: StepCosts, share: float) -> Shares:
    """The same share of every part."""
    return {part.name: share for layer in clock.model.layers for part in layer}


def two_bands(clock: StepCosts, pinned: int, there: Shares) -> tuple[Band, Band]:
    """The first layers with their homes on the GPU as `there` has it, the rest in memory."""
    rest = len(clock.model.layers) - pinned
    return Band(pinned, there), Band(rest, every(clock, 0.0))


def most_layers(clock: StepCosts, make: Callable[[int], PolicyPlacement]) -> PolicyPlacement | None:
    """The placement with the most layers that fits; None if not even none does."""
    low, high = -1, len(clock.model.layers)
    while low < high:  # what n layers take grows with n, but for windows, not needed with all
        middle = (low + high + 1) // 2
        if fits(clock, make(middle)):
            low = middle
        else:
            high = middle - 1
    return make(low) if low >= 0 else None


def with_output(clock: StepCosts, make: Callable[[bool], PolicyPlacement | None]) -> PolicyPlacement | None:
    """With the output on the GPU where all layers are, else without: it is read once, like a layer."""
    whole = make(True)
    if whole and all(any(band.there.values()) for band in whole.bands if band.layers):
        return whole
    return make(False)
