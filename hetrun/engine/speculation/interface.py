"""What guesses the next tokens of a sequence, as the engine knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetrun.backend import Floats

# Tokens of a draft: with the one before them they fill a small pass. Windows keep many more to be taken back.
LONGEST = 15


class Proposer(Protocol):
    """Guesses for one sequence. It keeps the list of the sequence's tokens, to which others append."""

    @property
    def seconds(self) -> float:
        """What it takes to make one of the guesses whose chances were asked for last."""
        ...

    def observe(self, first: int, hidden: Floats) -> None:
        """The model's hidden states of tokens from a position on, where they are kept."""
        ...

    def follow(self) -> None:
        """Look at what was appended since the last time."""
        ...

    def chances(self, n: int) -> Sequence[float]:
        """For each of the next n guesses, how likely it and all before it are right; fewer where there are
        fewer, none where there is nothing to guess from. They fall."""
        ...

    def propose(self, n: int) -> list[int]:
        """The guesses, as many as there were chances; none where something has to be read first."""
        ...

    def close(self) -> None:
        """The sequence has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Speculation:
    """What was asked for."""

    proposer: Callable[[list[int], int], Proposer]  # from tokens, of which the first n are the prompt
    # Only as many tokens at once as give the very bits that they give one by one.
    exact: bool = True
    close: Callable[[], None] = lambda: None  # give back what it takes
    reach: int = 0  # tokens at a prompt's end of which hidden states are kept, as of all of the answer
