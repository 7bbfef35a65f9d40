"""A small model that guesses for a large one, greedily, where a text does not say by itself how it goes on.

It has keys and values of its own, for a few sequences. Before it guesses it takes in what was appended
meanwhile, and takes back what it guessed wrongly. All of that is time that a step takes longer, and what it
takes is measured and charged.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from hetrun.backend import Floats
from hetrun.executor.interface import Model
from hetrun.executor.steps import Chunk, Step
from hetrun.memory.kv.states import StateMark
from hetrun.system.ema import smoothed
from hetrun.system.estimate import TrackedEstimate

AT_ONCE = 256  # tokens that it takes in between two steps of the large one: all requests wait for them
MOST_SEQUENCES = 8  # that it guesses for; of others only their own text knows
SMOOTHING = 0.1
FIRST_RATE = 0.6  # of guesses that are right, before any was seen
FORGIVING = 1 / 256  # as much is a rate forgiven for each token that it was not tried for
UNKNOWN_S = 0.01


class DraftModel:
    """The model, its sequences, and what it takes to have it guess."""

    def __init__(self, model: Model, n_vocab: int) -> None:
        """It guesses tokens of a vocabulary of this size, the same as its own, which may have more rows."""
        self._model, self._n_vocab = model, n_vocab
        self._held: dict[int, list[int]] = {}  # the tokens of each sequence
        self.rate = FIRST_RATE  # how many guesses were right, if all before them were
        self._a_guess = TrackedEstimate(UNKNOWN_S)  # seconds
        self._warm = False

    @property
    def seconds(self) -> float:
        """What one guess takes."""
        return self._a_guess.value

    @property
    def has_place(self) -> bool:
        """Whether it can begin one more sequence."""
        return len(self._held) < min(MOST_SEQUENCES, self._model.max_sequences)

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return self._model.context

    def begin(self) -> int:
        """A new sequence."""
        seq = self._model.alloc()
        self._held[seq] = []
        return seq

    def end(self, seq: int) -> None:
        """A sequence is over."""
        del self._held[seq]
        self._model.free(seq)

    def take_in(self, seq: int, tokens: Sequence[int]) -> bool:
        """A part of a long text; whether that was all but what a guess takes in itself."""
        same = self._keep(seq, tokens)
        if len(tokens) - same > AT_ONCE:
            self._step(seq, tokens[same : same + AT_ONCE])
        return len(tokens) - len(self._held[seq]) <= AT_ONCE

    def propose(self, seq: int, tokens: Sequence[int], n: int) -> list[int]:
        """What it would say next."""
        start, same = perf_counter(), self._keep(seq, tokens)
        found: list[int] = []
        new = tokens[same:]
        while len(found) < n:
            rows = self._step(seq, new)
            new = [int(rows[-1, : self._n_vocab].argmax())]
            found += new
        if self._warm and len(tokens) - same <= n + 1:  # else it took in a prompt, or was compiled
            self._a_guess.observe((perf_counter() - start) / n)
        self._warm = True
        return found

    def _keep(self, seq: int, tokens: Sequence[int]) -> int:
        """Take back what is not in the text; how much of it is held."""
        held = self._held[seq]
        same = _common(held, tokens)
        if same < len(held):
            same = self._model.truncate(seq, same)
            del held[same:]
        return same

    def _step(self, seq: int, new: Sequence[int]) -> Floats:
        """Some more tokens; the row of logits after them."""
        end = len(self._held[seq]) + len(new)
        marks = (StateMark(end),) if self._model.checkpoint_every else ()
        chunk = Chunk(seq, np.array(new, np.int64), np.array([len(new) - 1]), marks)
        rows = self._model.step(Step((chunk,)))
        self._held[seq] += new
        return rows

    def close(self) -> None:
        """Give its memory back."""
        self._model.close()

    def guesser(self, tokens: list[int]) -> DraftSequence:
        """What guesses for a sequence."""
        return DraftSequence(self, tokens)

    def chances(self, n: int) -> list[float]:
        """Of each of n guesses, that it and all before it are right."""
        return [self.rate ** (i + 1) for i in range(n)]

    def judged(self, place: int, right: bool) -> None:
        """A guess was right or not, after others that were."""
        self.rate = smoothed(self.rate, right, SMOOTHING)

    def rested(self) -> None:
        """A token came for which it was not asked."""
        self.rate = smoothed(self.rate, max(FIRST_RATE, self.rate), FORGIVING)


def _common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens a sequence may keep: one is always computed again, for the logits after it."""
    most = min(len(held), len(tokens) - 1)
    if list(held[:most]) == list(tokens[:most]):
        return most
    return next(i for i in range(most) if held[i] != tokens[i])


class DraftSequence:
    """One sequence, as the model knows it."""

    def __init__(self, model: DraftModel, tokens: list[int]) -> None:
        self._model, self._tokens = model, tokens
        self._seq: int | None = None
        self._sees = any([token < 0 for token in tokens])  # rows of pictures, which this model cannot read
        # One rate for all sequences: a model that reads along is good or bad at this one's work.
        self.judged, self.rested, self.chances = model.judged, model.rested, model.chances

    def observe(self, first: int, hidden: Floats) -> None:
        """It has thoughts of its own."""

    def may_ask(self, n: int) -> bool:
        """Whether there is room."""
        has = self._seq is not None or self._model.has_place
        return has and not self._sees and len(self._tokens) + n <= self._model.context

    def propose(self, n: int) -> list[int]:
        """What it would say next; nothing while it still has to read."""
        if self._seq is None:
            self._seq = self._model.begin()
        if not self._model.take_in(self._seq, self._tokens):
            return []
        return self._model.propose(self._seq, self._tokens, n)

    def close(self) -> None:
        """The sequence has ended."""
        if self._seq is not None:
            self._model.end(self._seq)
