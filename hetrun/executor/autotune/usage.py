"""What the model was used for in the last minutes: what copies of weights would have gained there."""

from __future__ import annotations

from collections.abc import Mapping
from math import pow

HALF_S = 600.0  # after which passes count half


class PassUsage:
    """Tokens of passes, by bucket. They fade; their seconds only grow."""

    def __init__(self) -> None:
        self.seconds = 0.0  # of all passes so far
        self._tokens: dict[str, float] = {}
        self._at = 0.0

    def observe(self, bucket: str, tokens: int, seconds: float, at: float) -> None:
        """A pass has run."""
        self.seconds += seconds
        self._fade(at)
        self._tokens[bucket] = self._tokens.get(bucket, 0.0) + tokens

    def tokens(self, at: float) -> Mapping[str, float]:
        """Of each bucket."""
        self._fade(at)
        return self._tokens

    def clear(self) -> None:
        """Begin anew: what was there has been answered."""
        self._tokens.clear()

    def _fade(self, at: float) -> None:
        left = pow(0.5, max(0.0, at - self._at) / HALF_S)
        self._tokens = {bucket: n * left for bucket, n in self._tokens.items()}
        self._at = at
