"""Which sequences run in the next step, and how many tokens of each.

There is no prefill and no decode: each sequence has tokens that the model has not seen, and each step closes
that gap within a budget. Running answers lack one token each and go first, so that a long prompt beside them
does not stop them; prompts share what is left, the oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Pending(Protocol):
    """What the scheduler knows of a sequence."""

    @property
    def missing(self) -> int:
        """Tokens that the model has not seen yet."""
        ...


P = TypeVar("P", bound=Pending)


def schedule(sequences: Sequence[P], budget: int) -> list[tuple[P, int]]:
    """Tokens of the next step, at most `budget` of them, sequences in order of arrival."""
    running = [s for s in sequences if s.missing == 1][:budget]
    left = budget - len(running)
    chosen = [(s, 1) for s in running]
    for s in sequences:
        if s.missing > 1 and left:
            n = min(s.missing, left)
            chosen.append((s, n))
            left -= n
    return chosen
