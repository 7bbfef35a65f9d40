"""Chooses which sequences are next, and with how many tokens.

There is no prefill and no decode: each sequence has tokens that the model has not seen, and each step closes
that gap within a budget. Running answers lack one token each and go first. Prompts share what is left: those
of a lower priority number first, then those of the client that was given least, then the oldest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class RequestSummary(Protocol):
    """What is known of a request before it has a place."""

    @property
    def client(self) -> str:
        """The client."""
        ...

    @property
    def priority(self) -> int:
        """Lower ones go first."""
        ...

    @property
    def arrived(self) -> float:
        """When it came."""
        ...


class PendingSequence(RequestSummary, Protocol):
    """What the scheduler knows of a sequence."""

    turn: int  # the number of its last turn; each turn of any sequence has the next number

    @property
    def missing(self) -> int:
        """Tokens that the model has not seen yet."""
        ...

    @property
    def most(self) -> int:
        """How many of them a step may have."""
        ...

    @property
    def least(self) -> int:
        """How many of them a step must have, if it has any."""
        ...


A = TypeVar("A", bound=RequestSummary)
P = TypeVar("P", bound=PendingSequence)


class Shares:
    """Tokens recently served to each client; the client with the fewest goes first (fair queueing).

    A client that comes, or comes back, begins with the fewest tokens of all clients that are here: it doesn't
    wait because of what it got long ago, nor may it make up for the time it was away.
    """

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._here: Counter[str] = Counter()  # requests of each client that are not over

    def came(self, client: str) -> None:
        """A client has one more request."""
        if not self._here[client]:
            least = min((self._given[c] for c in self._here if self._here[c]), default=0.0)
            self._given[client] = least
        self._here[client] += 1

    def left(self, client: str) -> None:
        """One request of a client is over. Of a client without any nothing is remembered."""
        self._here[client] -= 1
        if not self._here[client]:
            del self._here[client], self._given[client]

    def gave(self, client: str, tokens: int) -> None:
        """A client was given a share of a step."""
        self._given[client] += tokens

    def ordered(self, requests: Iterable[A]) -> list[A]:
        """Who goes first, first."""
        return sorted(requests, key=lambda r: (r.priority, self._given[r.client], r.arrived))


def split(sequences: Iterable[P]) -> tuple[list[P], list[P]]:
    """Running answers, which lack one token, and prompts."""
    answers: list[P] = []
    prompts: list[P] = []
    for s in sequences:
        (answers if s.missing == 1 else prompts).append(s)
    return answers, prompts


def share_out(answers: Sequence[P], prompts: Sequence[P], budget: int) -> list[tuple[P, int]]:
    """Tokens of a step for answers and prompts, at most `budget`; prompts come in the order they go."""
    left = budget - len(answers)
    if left < bool(prompts):  # too few places for all: the one that waited longest goes first
        waited = sorted([*answers, *prompts[:1]], key=lambda s: s.turn)
        return [(s, s.least) for s in waited[:budget]]
    chosen = [(s, 1) for s in answers]
    for s in prompts:
        n = min(s.missing, s.most, left)
        if n > 0:
            n = max(n, s.least)  # such tokens have a pass of their own
            chosen.append((s, n))
            left -= n
    return chosen


def last_in_line(sequences: Iterable[A]) -> A | None:
    """Who gives its memory up when there is too little: the youngest of the highest priority number."""
    return max(sequences, key=lambda s: (s.priority, s.arrived), default=None)
