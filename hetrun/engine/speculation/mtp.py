"""Guesses by the block inside a model's file that predicts one more token (MTP).

It wants what the model thought of each token, its hidden state, which comes with every step; and it has keys
and values of its own. It reads the last tokens of a prompt and all of the answer, and that only when it is
asked: where its guesses do not pay, it costs a copy of a row for each token.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate, chain, islice, repeat
from operator import mul
from time import perf_counter

import numpy as np

from hetrun.backend import Floats
from hetrun.engine.speculation.draft_model import FORGIVING
from hetrun.executor.mtp import Predictor
from hetrun.system.ema import smoothed
from hetrun.system.estimate import TrackedEstimate

REACH = 128  # tokens that it may take in at once: of a prompt, and of what came while it was not asked
# How many guesses are right if all before them are, before any was seen: it was trained for the first.
FIRST_RATES = (0.7, 0.6, 0.5)
WEIGHT = 3.0  # guesses that this counts
FADING = 0.95  # what a guess counts when the next one has come


class AcceptanceRates:
    """How often the first, second, ... guess of a draft is right if all before it are, in one text: what kind
    of text it is decides."""

    def __init__(self) -> None:
        self._right = [WEIGHT * rate for rate in FIRST_RATES]  # the last are those of all further guesses
        self._seen = [WEIGHT] * len(FIRST_RATES)

    def judged(self, place: int, right: bool) -> None:
        """A guess was right or not."""
        place = min(place, len(self._seen) - 1)
        self._right[place] = FADING * self._right[place] + right
        self._seen[place] = FADING * self._seen[place] + 1

    def rested(self) -> None:
        """A token came for which it was not asked: what was seen is believed a little less."""
        for i, first in enumerate(FIRST_RATES):
            self._right[i] = smoothed(self._right[i], WEIGHT * first, FORGIVING)
            self._seen[i] = smoothed(self._seen[i], WEIGHT, FORGIVING)

    def chances(self, n: int) -> list[float]:
        """Of each of n guesses, that it and all before it are right."""
        rates = [right / seen for right, seen in zip(self._right, self._seen, strict=True)]
        return list(accumulate(chain(rates, repeat(rates[-1], n)), mul))[:n]


class Predictions:
    """The block, and what a guess of it takes."""

    def __init__(self, block: Predictor) -> None:
        self._block = block
        self._a_guess = TrackedEstimate(block.about_s)  # seconds

    @property
    def seconds(self) -> float:
        """What one guess takes."""
        return self._a_guess.value

    def guesser(self, tokens: list[int]) -> MtpSequence:
        """What guesses for a sequence."""
        return MtpSequence(self._block, tokens, self._a_guess)

    def close(self) -> None:
        """The block is the model's."""


class MtpSequence:
    """One sequence, as the block knows it."""

    def __init__(self, block: Predictor, tokens: list[int], a_guess: TrackedEstimate) -> None:
        self._block, self._tokens, self._a_guess = block, tokens, a_guess
        self._rates = rates = AcceptanceRates()
        self.judged, self.rested, self.chances = rates.judged, rates.rested, rates.chances
        self._hidden: deque[Floats] = deque(maxlen=REACH)
        self._end = 0  # the position after that of the last hidden state
        self._seq: int | None = None
        self._first = 0  # the token that its keys and values begin with
        self._read = 0  # the next one, guesses left out
        # The first token after pictures, of whose rows the block knows nothing.
        self._least = next((i + 1 for i in reversed(range(len(tokens))) if tokens[i] < 0), 0)

    def observe(self, first: int, hidden: Floats) -> None:
        """The model's hidden states of tokens from a position on."""
        if first != self._end:
            self._hidden.clear()
        self._hidden.extend(hidden)
        self._end = first + len(hidden)

    def may_ask(self, n: int) -> bool:
        """Whether it can go on from the last token but one, of which it must know what the model thought."""
        has = self._seq is not None or self._block.has_place
        known = bool(self._hidden) and self._end == len(self._tokens) - 1 >= self._least
        return has and known and len(self._tokens) + n <= self._block.context

    def propose(self, n: int) -> list[int]:
        """What it would say next; nothing if others of this step took the last place since `may_ask`."""
        if self._seq is None and not self._block.has_place:
            return []
        start, seq = perf_counter(), self._go_on()
        new = self._tokens[self._read :]
        before = np.array(list(islice(self._hidden, len(self._hidden) - len(new), None)))
        guess = self._block.guess(seq, new, before)
        self._read = len(self._tokens)
        found = [guess.token]
        while len(found) < n:
            guess = self._block.guess(seq, found[-1:], guess.hidden)
            found.append(guess.token)
        if len(new) <= n + 1:  # else it took in what it had not been asked for
            self._a_guess.observe((perf_counter() - start) / n)
        return found

    def _go_on(self) -> int:
        """Its sequence, without guesses, and without what does not reach the hidden states that are left."""
        # The first token before which one is there.
        known = max(self._end - len(self._hidden) + 1, self._least)
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
