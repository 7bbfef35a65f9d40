"""The tokens that may still be chosen, and what a rule makes of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hetrun.sampling.rng import Doubles, Floats, draw, uniform, weights

Ints: TypeAlias = npt.NDArray[np.intp]

MOST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may still be chosen, at least one of them with a logit above -inf."""

    ids: Ints | None  # None: every token of the vocabulary, in order
    logits: Floats
    ranked: bool = False  # in descending order of logits, equals by ascending id
    impossible: int = 0  # further ones at -inf, which llama.cpp keeps in its list and counts

    @property
    def size(self) -> int:
        """How many llama.cpp would have in its list."""
        return len(self.logits) + self.impossible

    @property
    def peak(self) -> float:
        """The greatest logit."""
        return float(self.logits[0] if self.ranked else self.logits.max())

    def weights(self) -> Doubles:
        """Probabilities in units of the best token's."""
        return weights(self.logits, self.peak)

    def draw(self, u: float) -> int:
        """The token on which u, in [0, 1), falls."""
        place = draw(self.logits, self.peak, u)
        return place if self.ids is None else int(self.ids[place])

    def pick(self, chosen: Ints | slice, least: int = 0, ranked: bool = False) -> Candidates:
        """Only these; impossible ones fill up to `least`, if there were as many."""
        logits = self.logits[chosen]
        if self.ids is not None:
            ids = self.ids[chosen]
        else:
            assert not isinstance(chosen, slice)  # a whole vocabulary is not ranked
            ids = chosen
        more = max(min(least, self.size) - len(logits), 0)
        return Candidates(ids, logits, ranked or self.ranked, more)

    def find(self, tokens: Ints) -> tuple[Ints, Ints]:
        """Where some tokens (ascending, one at least) stand in the list, and which of them these are."""
        if self.ids is None:
            known = np.flatnonzero(tokens < len(self.logits))
            return tokens[known], known
        which = np.minimum(tokens.searchsorted(self.ids), len(tokens) - 1)
        places = np.flatnonzero(tokens[which] == self.ids)
        return places, which[places]

    def edit(self, places: Ints, logits: Doubles) -> Candidates:
        """With other logits at some places. They stay finite, as no rule but a bias forbids a token."""
        edited = self.logits.copy()
        edited[places] = np.clip(logits, -MOST, MOST, where=logits > -np.inf, out=logits)
        return Candidates(self.ids, edited, impossible=self.impossible)


class Past:
    """What a rule may know besides the candidates: which tokens came before, and its random numbers."""

    __slots__ = ("_tokens", "position", "seed")

    def __init__(self, seed: int, tokens: array[int], position: int = 0) -> None:
        self.seed = seed
        self.position = position  # how many tokens were accepted
        self._tokens = tokens  # of the prompt, and those accepted

    def last(self, n: int) -> npt.NDArray[np.int32]:
        """The last n tokens, or as many as there are."""
        return np.array(self._tokens[-n:], np.int32)

    def chance(self, stream: int) -> float:
        """A random number for the token that comes next; streams are independent of each other."""
        return uniform(self.seed, self.position, stream)

    def accept(self, token: int) -> None:
        self._tokens.append(token)
        self.position += 1

    def rollback(self, n: int) -> None:
        if not 0 <= n <= self.position:
            raise ValueError(f"cannot take back {n} tokens, {self.position} were accepted")
        self.position -= n
        del self._tokens[len(self._tokens) - n :]

    def clone(self) -> Past:
        return Past(self.seed, self._tokens[:], self.position)


Rule: TypeAlias = Callable[[Candidates, Past], Candidates]
