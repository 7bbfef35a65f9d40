"""Guesses by the block inside a model's file that predicts one more token (MTP).

It wants what the model thought of each token, its hidden state, which comes with every step; and it has keys
and values of its own. It reads the last tokens of a prompt and all of the answer, and that only when it is
asked: where its guesses do not pay, it costs a copy of a row for each token.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate, chain, repeat
from operator import mul
from time import perf_counter

import numpy as np

from hetrun.backend import Floats
from hetrun.engine.speculation.draft_model import FORGIVING, SMOOTHING
from hetrun.executor.mtp import Predictor
from hetrun.system.estimate import Tracked

REACH = 128  # tokens that it may take in at once: of a prompt, and of what came while it was not asked
# How many guesses are right if all before them are, before any was seen: it was trained for the first.
FIRST_RATES = (0.7, 0.6, 0.5)


class Rates:
    """How often the first, second, ... guess of a draft is right if all before it are."""

    def __init__(self) -> None:
        self._rates = list(FIRST_RATES)  # the last is that of all further ones

    def judged(self, place: int, right: bool) -> None:
        """A guess was right or not."""
        place = min(place, len(self._rates) - 1)
        self._rates[place] += SMOOTHING * (right - self._rates[place])

    def rested(self) -> None:
        """A token came for which it was not asked."""
        for i, first in enumerate(FIRST_RATES):
            self._rates[i] += FORGIVING * max(0.0, first - self._rates[i])

    def chances(self, n: int) -> list[float]:
        """Of each of n guesses, that it and all before it are right."""
        return list(accumulate(chain(self._rates, repeat(self._rates[-1], n)), mul))[:n]


class Predictions:
    """The block, and how good it is."""

    def __init__(self, block: Predictor) -> None:
        self._block, self._rates = block, Rates()
        self._a_guess = Tracked(block.about_s)  # seconds
        self.judged, self.rested, self.chances = self._rates.judged, self._rates.rested, self._rates.chances

    @property
    def seconds(self) -> float:
        """What one guess takes."""
        return self._a_guess.value

    def guesser(self, tokens: list[int]) -> Predicted:
        """What guesses for a sequence."""
        return Predicted(self._block, tokens, self._a_guess)

    def close(self) -> None:
        """The block is the model's."""


class Predicted:
    """One sequence, as the block knows it."""

    def __init__(self, block: Predictor, tokens: list[int], a_guess: Tracked) -> None:
        self._block, self._tokens, self._a_guess = block, tokens, a_guess
        self._hidden: deque[Floats] = deque(maxlen=REACH)
        self._end = 0  # the position after that of the last hidden state
        self._seq: int | None = None
        self._first = 0  # the token that its keys and values begin with
        self._read = 0  # the next one, guesses left out

    def saw(self, first: int, hidden: Floats) -> None:
        """The model's hidden states of tokens from a position on."""
        if first != self._end:
            self._hidden.clear()
        self._hidden.extend(hidden)
        self._end = first + len(hidden)

    def may_ask(self, n: int) -> bool:
        """Whether it can go on from the last token but one, of which it must know what the model thought."""
        has = self._seq is not None or self._block.has_place
        known = bool(self._hidden) and self._end == len(self._tokens) - 1
        return has and known and len(self._tokens) + n <= self._block.context

    def propose(self, n: int) -> list[int]:
        """What it would say next."""
        start, seq = perf_counter(), self._go_on()
        new, before = self._tokens[self._read :], np.array(list(self._hidden))
        guess = self._block.guess(seq, new, before[len(before) - len(new) :])
        self._read = len(self._tokens)
        found = [guess.token]
        while len(found) < n:
            guess = self._block.guess(seq, found[-1:], guess.hidden)
            found.append(guess.token)
        if len(new) <= n + 1:  # else it took in what it had not been asked for
            self._a_guess.saw((perf_counter() - start) / n)
        return found

    def _go_on(self) -> int:
        """Its sequence, without guesses, and without what does not reach the hidden states that are left."""
        known = self._end - len(self._hidden) + 1  # the first token before which one is there
        keeps = self._seq is not None and self._read >= known
        if self._seq is not None and not (keeps and self._block.keep(self._seq, self._read - self._first)):
            self.close()
        if self._seq is None:
            self._seq, self._first, self._read = self._block.alloc(), known, known
        return self._seq

    def close(self) -> None:
        """The sequence has ended."""
        if self._seq is not None:
            self._block.free(self._seq)
            self._seq = None
