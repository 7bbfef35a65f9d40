"""Seconds by size, if nothing predicts them: as they were measured, with straight lines between."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from hetrun.system.ema import smoothed
from hetrun.system.estimate import SHARE, TrackedEstimate


class SizeCurve:
    """A measured point for each power of two, and straight lines between them, which never fall.

    Beyond the ends sizes and seconds grow alike. For sizes below the least one that says too little, on
    purpose: a request that is refused for a guess would never be measured.
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, TrackedEstimate]] = {}  # bits of the size -> size, seconds
        self._sizes: list[float] | None = None  # of the points, in order; None: they have changed
        self._seconds: list[float] = []

    def observe(self, size: int, seconds: float) -> None:
        """Something of this size took so long."""
        bits = size.bit_length()
        known = self._points.get(bits)
        if known is None:
            tracked = TrackedEstimate()
            self._points[bits] = float(size), tracked
            tracked.observe(seconds)
        else:
            at, tracked = known
            if at != size:  # the point goes towards this size along the curve, and the time comes to it
                to = smoothed(at, size, SHARE)
                there = self._on(to)
                tracked.scale(there / self._on(at))
                seconds *= there / self._on(size)
                self._points[bits] = to, tracked
            tracked.observe(seconds)
        self._sizes = None

    def at(self, size: float) -> float | None:
        """Seconds of this size; never less than those of a smaller one. None: nothing was seen yet."""
        return self._on(size) if self._points else None

    def _on(self, size: float) -> float:
        if self._sizes is None:
            points = [self._points[bits] for bits in sorted(self._points)]
            self._sizes = [size for size, _ in points]
            self._seconds = list(accumulate((tracked.value for _, tracked in points), max))
        sizes, seconds = self._sizes, self._seconds
        i = bisect_left(sizes, size)
        if i == 0:
            return seconds[0] * size / sizes[0]
        if i == len(sizes):
            return seconds[-1] * size / sizes[-1]
        part = (size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i - 1] + part * (seconds[i] - seconds[i - 1])
