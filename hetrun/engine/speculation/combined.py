"""Guesses of a text's own past where those are likely, else of a model: a small one, or the block inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hetrun.backend import Floats
from hetrun.engine.speculation.interface import Proposer

SURE = 0.8  # where a text's own guess is as likely, no other is asked for


class Guesser(Protocol):
    """What guesses for one sequence, and costs time."""

    def observe(self, first: int, hidden: Floats) -> None:
        """The model's hidden states of tokens from a position on."""
        ...

    def may_ask(self, n: int) -> bool:
        """Whether it can make n guesses now."""
        ...

    def propose(self, n: int) -> list[int]:
        """Its n guesses; none where something has to be read first."""
        ...

    def chances(self, n: int) -> list[float]:
        """Of each of n guesses, that it and all before it are right."""
        ...

    def judged(self, place: int, right: bool) -> None:
        """The guess at a place of a draft was right or not; all before it were."""
        ...

    def rested(self) -> None:
        """A token came for which none was asked."""
        ...

    def close(self) -> None:
        """The sequence has ended."""
        ...


class SharedGuessers(Protocol):
    """What the guessers of all sequences have in common."""

    @property
    def seconds(self) -> float:
        """What one guess takes."""
        ...

    def guesser(self, tokens: list[int]) -> Guesser:
        """For one sequence, to whose tokens others append."""
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...


class CombinedGuesser:
    """Guesses for one sequence: of its own text where those are likely, else of a model."""

    def __init__(self, own: Proposer, tokens: list[int], guessing: SharedGuessers) -> None:
        self._own, self._tokens, self._guessing = own, tokens, guessing
        self._guesser = guessing.guesser(tokens)
        self._asks = False  # the model, and not the text
        self._guessed: list[int] = []  # by the model, after the first tokens, of which there were:
        self._after = len(tokens)

    @property
    def seconds(self) -> float:
        """For one guess of those whose chances were asked for last."""
        return self._guessing.seconds if self._asks else 0.0

    def observe(self, first: int, hidden: Floats) -> None:
        """The model's hidden states of tokens from a position on."""
        self._guesser.observe(first, hidden)

    def follow(self) -> None:
        """Whether guesses were right, and what is new."""
        came = self._tokens[self._after :]
        for place, (guess, token) in enumerate(zip(self._guessed, came, strict=False)):
            self._guesser.judged(place, guess == token)
            if guess != token:
                break
        if came and not self._guessed:
            self._guesser.rested()
        self._guessed, self._after = [], len(self._tokens)
        self._own.follow()

    def chances(self, n: int) -> Sequence[float]:
        """Of those who are likelier to be right."""
        own, theirs = self._own.chances(n), self._guesser.chances(n)
        likelier = (own[0] if own else 0.0) < min(SURE, theirs[0])
        self._asks = likelier and self._guesser.may_ask(n)
        return theirs if self._asks else own

    def propose(self, n: int) -> list[int]:
        """What they say; nothing while the model still has to read."""
        if not self._asks:
            return self._own.propose(n)
        self._guessed = self._guesser.propose(n)
        return self._guessed

    def close(self) -> None:
        """The sequence has ended."""
        self._guesser.close()
