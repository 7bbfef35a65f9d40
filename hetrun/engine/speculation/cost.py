"""What steps with drafts take: as the model predicts it, corrected by how long such steps really took.

A prediction knows nothing of the rows that a draft wants beside the last one, and some models predict nothing
at all. So steps are measured by how many tokens are tried, and what was not measured for long is believed
less and less: the machine may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pow

from hetrun.system.ema import smoothed

Predict = Callable[[Sequence[tuple[int, float]]], float | None]

SMOOTHING = 0.15
FORGOTTEN = 128  # steps behind which a correction counts half
FRESH = 32  # steps for which what follows from all that is good
PREDICTED = 1024  # steps for which a prediction is: it takes half a millisecond to make
COMPILING_S = 0.02  # that the first step of a shape takes longer, before one was seen
USES = 16  # steps that a shape of one sequence is thought to be good for; with several there are more shapes
MOST_SHAPES = 48  # as many as are kept compiled, about
GUESS = 4.0  # a step of n tokens takes about as long as n and so many more, where nothing else is known
UNKNOWN_S = 0.02
MOST_AT_ONCE = 2.0  # times as long as usual: as much of one step is believed

Shape = tuple[int, int, int]  # sequences, those with a draft, its tokens


@dataclass(slots=True)
class Correction:
    """How many times as long as predicted steps of one kind took."""

    factor: float
    step: int  # when one was seen last

    def saw(self, factor: float, step: int) -> None:
        """One more. One in which something else happened is no news of the others."""
        self.factor = smoothed(self.factor, min(factor, MOST_AT_ONCE * self.factor), SMOOTHING)
        self.step = step


class Costs:
    """Seconds of a step of answers, of which some carry drafts of equal length."""

    def __init__(self, predict: Predict) -> None:
        self._predict = predict
        self._step = 0
        self._until = FRESH  # the step at which what follows is old
        self._plain: dict[int, float] = {}  # measured seconds without drafts, by the bits of the sequences
        # By bits of sequences and of drafted tokens.
        self._corrections: dict[tuple[int, int], Correction] = {}
        self._expected: dict[tuple[int, int], float] = {}  # by sequences and drafted tokens
        self._found: dict[Shape, float] = {}
        self._shapes: dict[Shape, None] = {}  # those that were compiled, the last used last
        self._compiling = COMPILING_S

    def seconds(self, depths: Sequence[int], drafting: int, length: int) -> float:
        """A step of sequences behind so many tokens, of which some carry a draft of so many."""
        shape = len(depths), drafting, length
        found = self._found.get(shape)
        if found is None:
            drafted = drafting * length
            found = self._expect(depths, drafted) * self._factor(len(depths), drafted)
            if drafted and shape not in self._shapes:
                found += self._compiling * len(depths) / USES
            self._found[shape] = found
        return found

    def saw(self, depths: Sequence[int], drafting: int, length: int, seconds: float) -> None:
        """A step took so long."""
        n, drafted = len(depths), drafting * length
        self._step += 1
        shape, bits = (n, drafting, length), n.bit_length()
        if self._step >= self._until or drafted:
            self._found.clear()
        if self._step >= self._until:
            self._until = self._step + FRESH
        if self._step % PREDICTED == 0:
            self._expected.clear()
        if self._is_new(shape):
            if drafted:
                more = seconds - self._expect(depths, drafted)
                self._compiling = smoothed(self._compiling, max(0.0, more), SMOOTHING)
            return
        if not drafted:
            self._plain[bits] = smoothed(self._plain.get(bits), seconds, SMOOTHING)
        kind, factor = (bits, drafted.bit_length()), seconds / self._expect(depths, drafted)
        known = self._corrections.setdefault(kind, Correction(factor, self._step))
        known.saw(factor, self._step)

    def plain(self, n: int) -> float:
        """What steps of so many sequences without drafts took of late."""
        known = self._plain.get(n.bit_length())
        return next(iter(self._plain.values()), UNKNOWN_S) if known is None else known

    def _is_new(self, shape: Shape) -> bool:
        """Whether steps of a shape were compiled now: what they take says nothing of the next ones."""
        new = shape not in self._shapes
        if new or shape[1]:
            self._shapes.pop(shape, None)
            self._shapes[shape] = None
        if len(self._shapes) > MOST_SHAPES:
            del self._shapes[next(iter(self._shapes))]
        return new

    def _expect(self, depths: Sequence[int], drafted: int) -> float:
        """As predicted, or guessed from steps without drafts."""
        n = len(depths)
        found = self._expected.get((n, drafted))
        if found is None:
            chunks = [(1, float(depth)) for depth in depths]
            chunks[0] = 1 + drafted, chunks[0][1]
            predicted = self._predict(chunks)
            if not predicted:  # not kept: it rests on what is measured
                return self.plain(n) * (n + drafted + GUESS) / (n + GUESS)
            found = self._expected[n, drafted] = predicted
        return found

    def _factor(self, n: int, drafted: int) -> float:
        """What was seen of such steps; the older, the more they are taken for those without drafts."""
        plain = self._corrections.get((n.bit_length(), 0))
        usual = plain.factor if plain else 1.0
        found = self._corrections.get((n.bit_length(), drafted.bit_length()))
        if found is None or not drafted:
            return usual
        return usual + (found.factor - usual) * pow(0.5, (self._step - found.step) / FORGOTTEN)
