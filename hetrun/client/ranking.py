"""From a reranker's judgements to scores, and the best documents first."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from hetrun.client.events import Event


def log_odds(event: Event) -> float:
    """How much more likely yes is than no, by the last event of a document that was ranked."""
    assert event.embedding is not None, "it ended without an error"
    (found,) = struct.unpack("<f", event.embedding)
    return float(found)


def probability(odds: float) -> float:
    """The probability of yes, if the answer is yes or no."""
    if odds < 0:  # so that nothing overflows
        return math.exp(odds) / (1 + math.exp(odds))
    return 1 / (1 + math.exp(-odds))


def best_first(scores: Sequence[float], top_n: int | None = None) -> list[int]:
    """The numbers of the documents, the best first, and of equal ones the earlier; at most `top_n`."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:top_n]
