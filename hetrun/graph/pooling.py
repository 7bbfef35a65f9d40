"""From the hidden states of a text's tokens, pass by pass, to one vector that stands for the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import BackendError

# Of the hidden states of a text's tokens: their mean, the last one, or the first one.
Pooling = Literal["mean", "last", "cls"]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
STORED = np.dtype("<f4")  # as it crosses pipes and networks
# The first row, and the one after the last; a document is ranked by its last one.
ROWS: dict[str, Callable[[int], tuple[int, int]]] = {
    "mean": lambda n: (0, n),
    "last": lambda n: (n - 1, n),
    "cls": lambda n: (0, 1),
    "rank": lambda n: (n - 1, n),
}


class MeanPool:
    """The mean of the rows of some tokens; each is added once, whatever is computed again."""

    def __init__(self, pooling: Pooling | Literal["rank"], tokens: int, width: int) -> None:
        """Of a text of `tokens` tokens."""
        self._begin, self._end = ROWS[pooling](tokens)
        self._next = self._begin  # the first token whose row is missing
        self._sum = np.zeros(width)

    def wanted(self, computed: int, n: int) -> Ints:
        """Which of the next n tokens' rows are missing, behind those that are computed."""
        return np.arange(max(self._next, computed), min(self._end, computed + n)) - computed

    def add(self, rows: Floats) -> None:
        """The rows that were missing."""
        if not np.isfinite(rows).all():
            raise BackendError("the model's hidden states are not numbers; its weights may be damaged")
        for row in rows:  # one by one, so that the sum does not tell where passes were cut
            self._sum += row
        self._next += len(rows)

    @property
    def of_last(self) -> bool:
        """Whether only the last row counts, so that others may come from the prefix cache."""
        return self._begin > 0 and self._end == self._begin + 1

    @property
    def vector(self) -> bytes | None:
        """None as long as rows are missing."""
        if self._next < self._end:
            return None
        return (self._sum / (self._end - self._begin)).astype(STORED).tobytes()


def read_vector(stored: bytes, normalise: bool = True) -> Floats:
    """A vector as numbers, of length 1 if wanted; one of zeros stays what it is."""
    vector = np.frombuffer(stored, STORED).astype(np.float32)
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype(np.float32) if normalise and length else vector
