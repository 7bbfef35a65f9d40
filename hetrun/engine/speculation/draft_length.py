"""How long drafts are worth being: the length at which tokens come fastest, or none.

A step gives a token of each sequence in any case. A draft adds those that are going to be right, and the time
that the step takes longer: next to none where weights come from disk, a tenth or a fifth for each token where
one sequence reads weights from memory, and as much as it can win where many sequences share a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from hetrun.engine.speculation.cost import DraftCosts

LENGTHS = (1, 3, 7, 15)  # few, because each makes a graph of its own
BEGIN, GO_ON = 0.06, 0.03  # how much faster it must be, by prediction
# With more sequences by so much more for each: what some of them win, the others wait for, and when the first
# ones have ended a step gives fewer tokens.
EACH = 0.015
PATIENCE = 2.0  # times as long as without drafts a step may take for those that carry none
# How many of n sequences may carry drafts, by n: few different numbers, for the same reason.
COUNTS = [sorted({1 << i for i in range(n.bit_length())} | ({n} - {0})) for n in range(257)]
LIKELY = 0.05  # chance of a first guess below which nothing is worth a look


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A sequence that may carry a draft."""

    place: int  # among those of the step
    chances: Sequence[float]  # of each guess, that it and those before it are right
    most: int  # tokens that there is room for
    seconds: float = 0.0  # that each guess takes to make


@dataclass(frozen=True, slots=True)
class Decision:
    """Which sequences carry a draft, and how long it is; none, if it does not pay."""

    places: tuple[int, ...] = ()
    length: int = 0
    gain: float = 0.0  # tokens more than without, by prediction


NOTHING = Decision()


def decide(
    candidates: Sequence[DraftCandidate],
    depths: Sequence[int],
    costs: DraftCosts,
    most: int,
    drafting: bool = False,
    trust: float = 1.0,
) -> Decision:
    """The best for a step of sequences at these depths, with at most this many guesses in all.

    `drafting`: whether the last step carried any; it takes more to begin than to go on. `trust`: which part
    of what was recently promised has come true.
    """
    likely = [c for c in candidates if c.chances and c.chances[0] >= LIKELY]
    if not likely:
        return NOTHING
    n, plain = len(depths), costs.seconds(depths, 0, 0)
    best = (1 + (GO_ON if drafting else BEGIN) + EACH * (n - 1)) * n / plain
    found = NOTHING
    for length in LENGTHS:
        able = [(trust * sum(c.chances[:length]), c) for c in likely if c.most >= length]
        able.sort(key=itemgetter(0), reverse=True)
        for count in COUNTS[min(len(able), most // length)]:
            gain = sum([gain for gain, _ in able[:count]])
            making = length * sum([c.seconds for _, c in able[:count]])
            seconds = costs.seconds(depths, count, length) + making
            if count < n and seconds > PATIENCE * plain:
                continue
            rate = (n + gain) / seconds
            if rate > best:
                best, found = rate, Decision(tuple([c.place for _, c in able[:count]]), length, gain)
    return found
