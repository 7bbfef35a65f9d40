"""Whether it pays to read experts before a router has chosen them: tried on the passes of answers, again and
again, because it depends on the model, the text and the disk."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median

BLOCK = 12  # passes in a row with hints, or without
PAIRS = 4  # of blocks, in turn: with, without, without, with
HELD = 800  # passes before it is tried again
WORTH = 0.99  # of the time without hints: as much as they must save, because they read what is not used
ORDER = (True, False, False, True)


class HintTrial:
    """Says for each pass whether hints are followed."""

    def __init__(self) -> None:
        self.on = True
        self.gain = 0.0  # the share of a pass's time that hints save, as tried last
        self._left = 0
        self._seconds: list[float] = []
        self._plan = self._decisions()
        next(self._plan)

    def observe(self, seconds: float) -> None:
        """A pass of an answer took so long."""
        self._seconds.append(seconds)
        self._left -= 1
        if not self._left:
            next(self._plan)
            self._seconds = []

    def _decisions(self) -> Iterator[None]:
        """Goes on at the end of each block, whose times are there."""
        while True:
            yield from self._try()
            self._left = HELD
            yield

    def _try(self) -> Iterator[None]:
        means: dict[bool, list[float]] = {True: [], False: []}
        for turn in ORDER * (PAIRS // 2):
            self.on, self._left = turn, BLOCK
            yield
            means[turn].append(fmean(self._seconds))
        ratio = median(on / off for on, off in zip(means[True], means[False], strict=True))
        self.gain, self.on = 1 - ratio, ratio < WORTH
