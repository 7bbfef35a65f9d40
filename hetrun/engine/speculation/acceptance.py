"""How often guesses are right, by how much of the text before them was found again.

Guessing costs nothing, so it is done for every token, whether or not anybody tries the guess: what is known
here was learned for free, and a text that does not repeat itself pays nothing to find that out.
"""

from __future__ import annotations

from itertools import accumulate
from math import sqrt
from operator import mul

LONGEST = 24  # tokens: longer matches are all alike
# Which class a match of 0, 1, 2, ... tokens is in, and how often guesses of a class are right, before any
# was seen: few, so that what is not known is seldom tried.
CLASSES = (0, 0, 1, 2, 3, 3, 4, 4, 4, *[5] * 8, *[6] * 8)
PRIORS = (0.1, 0.3, 0.45, 0.55, 0.65, 0.8, 0.9)
FADING = 0.97  # what a guess counts when the next one of its class has come
FADING_SHARED = 0.99
WEIGHT = 6.0  # guesses that the knowledge of all sequences counts in one of them
DOUBT = 0.7  # standard deviations by which a rate may be worse than it looks: what looks good is chosen
WEIGHT_OF_PRIORS = 8.0


class SharedAcceptance:
    """What all sequences had in common: what a new one begins with."""

    def __init__(self) -> None:
        self._right = [WEIGHT_OF_PRIORS * p for p in PRIORS]
        self._seen = [WEIGHT_OF_PRIORS] * len(PRIORS)

    def observe(self, kind: int, right: bool) -> None:
        """One more guess."""
        self._right[kind] = FADING_SHARED * self._right[kind] + right
        self._seen[kind] = FADING_SHARED * self._seen[kind] + 1

    def rate(self, kind: int) -> float:
        """How many of a class are right."""
        return self._right[kind] / self._seen[kind]


class Acceptance:
    """The same of one sequence."""

    def __init__(self, shared: SharedAcceptance) -> None:
        self._shared = shared
        self._right = [0.0] * len(PRIORS)
        self._seen = [0.0] * len(PRIORS)
        self._rates: list[float] | None = None  # by length of the match

    def observe(self, length: int, right: bool) -> None:
        """A guess after a match of this many tokens was right or not."""
        kind = CLASSES[min(length, LONGEST)]
        self._right[kind] = FADING * self._right[kind] + right
        self._seen[kind] = FADING * self._seen[kind] + 1
        self._shared.observe(kind, right)
        self._rates = None

    def chances(self, length: int, n: int) -> list[float]:
        """Of each of n guesses after a match of this many tokens, that it and all before it are right.

        Whatever is right makes the match longer.
        """
        rates = self._rates = self._rates or self._by_length()
        known = rates[length : length + n]
        return list(accumulate(known + rates[-1:] * (n - len(known)), mul))

    def _by_length(self) -> list[float]:
        rates = [self._rate(kind) for kind in range(len(PRIORS))]
        return [rates[kind] for kind in CLASSES]

    def _rate(self, kind: int) -> float:
        n = self._seen[kind] + WEIGHT
        p = (self._right[kind] + WEIGHT * self._shared.rate(kind)) / n
        return max(0.0, p - DOUBT * sqrt(p * (1 - p) / n))
