"""DRY ("don't repeat yourself"): what would continue a repetition becomes less probable, the longer the more.

A repetition is an end of the text that the text already held; the token that followed it there is the one
that would continue it. Sequence breakers end repetitions: none reaches back over one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetrun.sampling.candidates import Candidates, Past

# Both are llama.cpp's limits, so that a scan for breakers is linear in the text.
BREAKER_BYTES = 40
TAIL_TOKENS = 20

SEPARATOR = b"\xff"  # not in UTF-8, so in no breaker
LOG_MOST = 88.7228391  # what llama.cpp takes for the logarithm of float32's greatest number

Tokens = npt.NDArray[np.int32]
# A breaker as tokens: the one that it begins in, and the ways in which it goes on behind it.
Breakers = Mapping[int, Sequence[tuple[int, ...]]]
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class DryRule:
    """The rule, with its breakers found."""

    last_n: int
    multiplier: float
    base: float
    allowed: int  # repetitions of less are free
    breakers: Breakers

    def __call__(self, c: Candidates, past: Past) -> Candidates:
        text = past.last(self.last_n)
        if len(text) <= self.allowed:
            return c
        # Lengths beyond the last that changes the penalty need not be told apart.
        longest = self.allowed + (self._most_exponent or len(text))
        limit = min(reach(text, self.breakers, longest), longest)
        if limit < self.allowed:
            return c
        repeated = continuations(text, self.allowed, limit)
        found = [t for t in sorted(repeated) if () not in self.breakers.get(t, ())]
        if not found:
            return c
        places, which = c.find(np.array(found, np.intp))
        exponents = np.array([repeated[t] - self.allowed for t in found], np.float64)[which]
        return c.edit(places, c.logits[places] - self.multiplier * self.base**exponents)

    @property
    def _most_exponent(self) -> int:
        """Above it the penalty grows no more; 0: it grows without end."""
        return int(LOG_MOST / math.log(self.base)) if self.base > 1.000001 else 0


def reach(text: Tokens, breakers: Breakers, longest: int) -> int:
    """How many tokens at the end of the text no breaker touches; more than `longest` are not needed."""
    recent = text[: -(longest + TAIL_TOKENS + 2) : -1].tolist()  # the last one first
    for i, token in enumerate(recent):
        behind = tuple(recent[max(i - TAIL_TOKENS, 0) : i][::-1])
        whole = [len(tail) for tail in breakers.get(token, ()) if behind[: len(tail)] == tail]
        if whole:
            return i - max(whole)
    return len(text)


def continuations(text: Tokens, least: int, most: int) -> dict[int, int]:
    """The tokens that would continue a repetition of `least` tokens or more, and how many it has.

    A repetition is compared up to `most` tokens, and only within the text.
    """
    others = len(text) - 1
    same = np.ones(others, np.bool_)  # an earlier repetition that ends here is as long as asked for so far
    lengths = np.zeros(others, np.intp)
    for length in range(most):
        same[:length] = False
        same[length:] &= text[: others - length] == text[others - length]
        if not same.any():
            break
        lengths += same
    ends = (lengths >= least).nonzero()[0]
    ends = ends[lengths[ends].argsort(kind="stable")]  # the longest last: it stays
    return dict(zip(text[ends + 1].tolist(), lengths[ends].tolist(), strict=True))


def find_breakers(strings: Sequence[str], pieces: Sequence[bytes], encode: Encode | None) -> Breakers:
    """Which tokens hold a breaker, and which end in the beginning of one, with the tokens of its rest.

    Without `encode` only breakers within one token count.
    """
    found: dict[int, list[tuple[int, ...]]] = {}
    text = SEPARATOR.join((*pieces, b""))
    starts = np.cumsum([0, *(len(piece) + 1 for piece in pieces)])

    def tokens_with(what: bytes) -> list[int]:
        places = [match.start() for match in re.finditer(re.escape(what), text)]
        tokens: list[int] = np.unique(starts.searchsorted(places, "right") - 1).tolist()
        return tokens

    for string in strings:
        breaker = string.encode("utf-8", "surrogatepass")[:BREAKER_BYTES]
        holders = set(tokens_with(breaker))
        for token in holders:
            found.setdefault(token, []).append(())
        if encode is None:
            continue
        for n in range(1, len(breaker)):
            tail = tuple(encode(breaker[n:].decode("utf-8", "replace")))[:TAIL_TOKENS]
            for token in tokens_with(breaker[:n] + SEPARATOR):
                if token not in holders and pieces[token].endswith(breaker[:n]):
                    found.setdefault(token, []).append(tail)
    return found
