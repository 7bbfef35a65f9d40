"""Figures that are measured again and again beside other programs, and what to expect of the next one.

Such noise is one-sided and has a heavy tail, and now and then everything changes at once, because another
program took half of the cores or gave them back. So one measurement alone moves nothing, and two that agree
are believed. The width of what is expected does not follow from a formula of the noise: it grows with each
miss and shrinks with each hit, at rates that let as many be missed as are meant to be, whatever the noise is.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

NORMAL = 1.645  # standard deviations on either side that hold nine in ten of a normal distribution
MISSED = 0.03  # of the measurements on either side; less than 0.05, as widths are learned, too
WIDENING = 1.2  # deviations that a side goes out by for a miss
FIRST_WIDTH, LEAST_WIDTH, MOST_WIDTH = 2.5, 0.5, 100.0  # of a side, in deviations
FIRST_DEVIATION, LEAST_DEVIATION = 0.3, 0.01  # of logarithms
DEVIATION_SHARE = 0.06  # of the newest in the deviation
FAR = 10.0  # deviations; more of one measurement is no news of the others
SHARE = 0.2  # of the newest in the middle
SHIFTED = 3.0  # deviations beyond which two of three in a row have another reason than noise
LEAST = 1e-12  # what is measured as nothing


class Estimate(NamedTuple):
    """Seconds of something that is going to happen: nine times in ten it takes from `least` to `most`."""

    seconds: float
    least: float
    most: float

    @property
    def spread(self) -> float:
        """The standard deviation relative to `seconds`, as a normal distribution of this width has it."""
        return log(self.most / self.least) / (2 * NORMAL) if self.least > 0 else 0.0


class TrackedEstimate:
    """A positive figure: its middle, and how far from it measurements lie.

    Begun with a guess it takes two measurements that agree to leave it; otherwise the first one counts.
    """

    __slots__ = ("_above", "_before", "_below", "_deviation", "_last", "_level", "_seen", "value")

    def __init__(self, guess: float | None = None) -> None:
        self.value = 0.0 if guess is None else guess  # 0: nothing is known
        self._level = 0.0 if guess is None else log(max(guess, LEAST))
        self._last = self._before = self._level  # the last two measurements
        self._seen = 0  # which have part in the middle
        self._deviation = FIRST_DEVIATION
        self._above = self._below = FIRST_WIDTH

    def observe(self, value: float) -> None:
        """One more measurement."""
        now = log(value if value > LEAST else LEAST)
        if not self.value:
            self.value, self._level = value if value > LEAST else LEAST, now
            self._last = self._before = now
            return
        off = now - self._level
        deviation = self._deviation
        self._calibrate(off)
        far = off if off > 0 else -off
        limit = FAR * deviation
        self._deviation = max(
            LEAST_DEVIATION, deviation + DEVIATION_SHARE * ((far if far < limit else limit) - deviation)
        )
        self._follow(_middle(self._before, self._last, now) - self._level)
        self._before, self._last = self._last, now
        self.value = exp(self._level)

    def reopen(self) -> None:
        """What is measured from now on may be another thing: it counts as much as all that was."""
        self._seen = 0

    def scale(self, factor: float) -> None:
        """The same at another size, where it is `factor` times as much."""
        if self.value:
            more = log(factor)
            self._level += more
            self._last += more
            self._before += more
            self.value = exp(self._level)

    @property
    def below(self) -> float:
        """The factor from the middle to the least that is expected."""
        return exp(-min(self._below * self._deviation, MOST_WIDTH))

    @property
    def above(self) -> float:
        """The factor from the middle to the most that is expected."""
        return exp(min(self._above * self._deviation, MOST_WIDTH))

    @property
    def estimate(self) -> Estimate | None:
        """As seconds; None: nothing is known."""
        return self.about(self.value) if self.value else None

    def about(self, seconds: float) -> Estimate:
        """Seconds that are as uncertain as this is."""
        return Estimate(seconds, seconds * self.below, seconds * self.above)

    def _calibrate(self, off: float) -> None:
        deviation = self._deviation
        wider = WIDENING * (1 - MISSED) if off > self._above * deviation else -WIDENING * MISSED
        self._above = min(max(self._above + wider, LEAST_WIDTH), MOST_WIDTH)
        wider = WIDENING * (1 - MISSED) if -off > self._below * deviation else -WIDENING * MISSED
        self._below = min(max(self._below + wider, LEAST_WIDTH), MOST_WIDTH)

    def _follow(self, off: float) -> None:
        """Go towards the middle one of the last three, and all the way where that is no noise."""
        if not -SHIFTED * self._deviation <= off <= SHIFTED * self._deviation:
            self._seen = 1
            self._level += off
            return
        self._level += off * max(SHARE, 1 / max(self._seen, 1))
        self._seen += 1


def _middle(a: float, b: float, c: float) -> float:
    if a > b:
        a, b = b, a
    return a if c < a else b if c > b else c
