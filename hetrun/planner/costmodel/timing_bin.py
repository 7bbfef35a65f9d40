"""Runs of about one size, smoothed: what the forecast keeps instead of every run."""

from __future__ import annotations

from math import sqrt

STEADY = 10  # runs that are averaged evenly; from then on each new one counts for 1 in STEADY
FAR = 5.0  # a run that takes more than this many times as long was delayed by the machine...
BELIEVED = 3  # ...unless this many come in a row
WARM = 1.5  # a first run is often slower by more than this: memory is touched, code is made
DRIFT = 0.1  # of a time: less is no reason to decide again
SURE = 3.0  # standard errors
UNKNOWN = 0.05  # of a time: what a run or two may be off, which show no spread
LEAST_S = 1e-9  # nothing takes no time, whatever a coarse clock says: others divide by what is found here
FLOOR = 0.01  # of a time: two cells measured at different hours differ by this much, however steady each is

Size = tuple[int, int]  # classes of tokens and of depth


def size_of(tokens: int, depth: float) -> Size:
    """Which cell a run belongs to."""
    return tokens_class(tokens), depth_class(depth)


def tokens_class(tokens: int) -> int:
    """1, 2, 3-4, 5-8, 9-16 tokens and so on, numbered from 0."""
    return (tokens - 1).bit_length()


def depth_class(depth: float) -> int:
    """Depths under 16, then 16-63, 64-255 and so on, numbered from 0."""
    return ((int(depth) >> 4).bit_length() + 1) >> 1


class TimingBin:
    """The runs of one work at about one size, and the size that they stand for.

    It is written after every segment that runs, so adding costs less than a microsecond.
    """

    __slots__ = ("_even", "_slow", "best", "depth", "rough", "runs", "smoothed", "spread", "tokens")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every run. The cell stays in use."""
        self.runs = 0  # that count, ever
        self.tokens = 0.0
        self.depth = 0.0
        self.smoothed = 0.0  # seconds
        self.spread = 0.0  # mean distance of a run from the smoothed time
        self.best = float("inf")
        self.rough = 0.0  # how far off all of that may be, relative: it was measured beside other programs
        self._even = 0  # runs in the mean, up to STEADY
        self._slow = 0  # far slower runs in a row, not counted so far

    def rescale(self, factor: float) -> None:
        """As if every run had taken `factor` times as long; new runs count more for a while."""
        self.smoothed = max(LEAST_S, factor * self.smoothed)
        self.spread *= factor
        self.best = max(LEAST_S, factor * self.best)
        self._even = min(self._even, BELIEVED)

    def restore(
        self,
        runs: int,
        tokens: float,
        depth: float,
        smoothed: float,
        spread: float,
        best: float,
        rough: float = 0.0,
    ) -> None:
        """The cell as it was saved."""
        self.rough = rough
        self.runs, self.tokens, self.depth = runs, tokens, depth
        self.smoothed, self.spread, self.best = max(LEAST_S, smoothed), spread, max(LEAST_S, best)
        self._even, self._slow = min(runs, STEADY), 0

    def add_rough(self, tokens: int, depth: float, seconds: float, rough: float) -> None:
        """One more run, beside other programs: it counts where nothing better is known."""
        if self.runs and self.rough < rough:
            return
        self.rough = 0.0
        self.add(tokens, depth, seconds)
        self.rough = rough

    def add(self, tokens: int, depth: float, seconds: float) -> None:
        """One more run."""
        if self.rough:  # that was a guess, and this is not
            runs = self.runs
            self.clear()
            self.runs = runs
        if seconds < LEAST_S:
            seconds = LEAST_S
        even = self._even
        if even:
            if seconds > FAR * self.smoothed:
                if self._disturbed(tokens, depth, seconds):
                    return
                even = self._even
            elif seconds * (WARM if even < 3 else FAR) < self.smoothed:
                even = self._without_slow_start(tokens, depth, seconds)
            self._slow = 0
        self.runs += 1
        if even < STEADY:
            self._even = even = even + 1
        off = seconds - self.smoothed
        if even == 1:
            self.tokens, self.depth, self.smoothed, self.spread = float(tokens), float(depth), seconds, 0.0
        else:
            self.tokens += (tokens - self.tokens) / even
            self.depth += (depth - self.depth) / even
            self.smoothed += off / even
            self.spread += ((off if off > 0 else -off) - self.spread) / even
        if seconds < self.best:
            self.best = seconds

    def _disturbed(self, tokens: int, depth: float, seconds: float) -> bool:
        """Whether a far slower run is left out. One that is larger may be slower, at most in proportion."""
        larger = max(1.0, tokens / self.tokens) * max(1.0, depth / max(self.depth, 1.0))
        if seconds <= FAR * larger * self.smoothed:
            return False
        self._slow += 1
        if self._slow < BELIEVED:
            return True
        self._even = 0  # it is like this now
        return False

    def _without_slow_start(self, tokens: int, depth: float, seconds: float) -> int:
        """Runs that still count beside a far faster one: nothing makes work faster than it is."""
        smaller = min(1.0, tokens / self.tokens) * min(1.0, max(depth, 1.0) / max(self.depth, 1.0))
        even = self._even
        return 0 if seconds * (WARM if even < 3 else FAR) < smaller * self.smoothed else even

    @property
    def error(self) -> float:
        """The standard error of the smoothed time, as far as its own runs tell."""
        even = self._even
        if not even:
            return float("inf")
        spread = max(self.spread, UNKNOWN * self.smoothed) if even < BELIEVED else self.spread
        # A normal mean distance is 0.8 deviations; smoothing is worth 2 * STEADY - 1 runs.
        return 1.25 * spread / sqrt(even if even < STEADY else 2 * STEADY - 1)

    @property
    def variance(self) -> float:
        """How far the smoothed time may be from a time taken elsewhere, squared."""
        floor = max(FLOOR, self.rough) * max(self.smoothed, LEAST_S)
        return self.error**2 + floor**2

    def drifted(self, expected: float) -> bool:
        """Whether the last runs took another time than `expected`: by over 10 %, and more than noise."""
        if self._even < BELIEVED:
            return False
        off = abs(self.smoothed - expected)
        return off > DRIFT * expected and off > SURE * self.error
