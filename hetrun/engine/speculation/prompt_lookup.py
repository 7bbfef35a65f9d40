"""Prompt lookup: what followed the last few tokens when they stood in this text before.

A table finds pairs of tokens, and a chain where a pair stood before that. Of the last few places, the one is
taken before which the longest stretch of text is the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hetrun.backend import Floats
from hetrun.engine.speculation.acceptance import LONGEST, Acceptance

ENOUGH = 4  # tokens of a match after which no better one is looked for
PLACES = 8  # of a pair that are looked at
# Tokens of a prompt that are taken in between two steps: they take some tenths of a millisecond
AT_ONCE = 512
NOWHERE = -1


class PromptLookup:
    """Guesses for one sequence from its own tokens."""

    seconds = 0.0  # as good as none

    def __init__(self, tokens: list[int], n_prompt: int, acceptance: Acceptance) -> None:
        self._tokens = tokens
        self._n_prompt = n_prompt
        self._acceptance = acceptance
        self._known = 0  # tokens that are in the tables
        self._single: dict[int, int] = {}  # a token -> where it stood last
        self._pair: dict[int, int] = {}  # two -> where the second one did
        self._earlier = array("i")  # of each place: where the pair that ends there stood before
        self._at = NOWHERE  # the place whose token should come next
        self.length = 0  # of the match that ends there

    def observe(self, first: int, hidden: Floats) -> None:
        """It looks at tokens only."""

    def follow(self) -> None:
        """Take in what is new, a long prompt part by part."""
        tokens, n = self._tokens, len(self._tokens)
        if self._known < self._n_prompt - 1:
            self._take_in(min(self._n_prompt - 1, self._known + AT_ONCE))
            if self._known < self._n_prompt - 1:
                return
        while self._known < n:
            i = self._known
            if self.length:
                self._judge(tokens[i], scored=i >= self._n_prompt)
            if self.length < ENOUGH and i:
                self._find(i)
            self._take_in(i + 1)

    def chances(self, n: int) -> Sequence[float]:
        """Of the next n guesses; none where nothing like the end of the text stood before."""
        if not self.length or self._known < len(self._tokens):
            return ()
        return self._acceptance.chances(self.length, n)

    def propose(self, n: int) -> list[int]:
        """What followed. It may run into itself: a text that repeats its last words does so again."""
        found = self._tokens[self._at : self._at + n]
        for i in range(n - len(found)):
            found.append(found[i])
        # What stands for rows of pictures is no guess.
        return next((found[:i] for i, token in enumerate(found) if token < 0), found)

    def close(self) -> None:
        """Nothing to give back."""

    def _judge(self, token: int, scored: bool) -> None:
        """The next token has come: whether the guess was right."""
        right = self._tokens[self._at] == token
        if scored:
            self._acceptance.observe(self.length, right)
        self.length = min(self.length + 1, LONGEST) if right else 0
        self._at += 1

    def _find(self, i: int) -> None:
        """The longest match of the text up to place i, and of equal ones the last."""
        tokens = self._tokens
        place = self._pair.get(tokens[i - 1] << 32 ^ tokens[i], NOWHERE)
        if place == NOWHERE:
            place = self._single.get(tokens[i], NOWHERE)
            if place != NOWHERE and not self.length:
                self._at, self.length = place + 1, 1
            return
        for _ in range(PLACES):
            length = self._same(place, i)
            if length > self.length:
                self._at, self.length = place + 1, length
            place = self._earlier[place]
            if place == NOWHERE or self.length >= LONGEST:
                return

    def _same(self, place: int, i: int) -> int:
        """How many tokens before and at two places are the same; at least two are."""
        tokens, n, most = self._tokens, 2, min(LONGEST, place + 1)
        while n < most and tokens[place - n] == tokens[i - n]:
            n += 1
        return n

    def _take_in(self, end: int) -> None:
        tokens, single, pair, earlier = self._tokens, self._single, self._pair, self._earlier
        for i in range(self._known, end):
            token = tokens[i]
            single[token] = i
            if i:
                key = tokens[i - 1] << 32 ^ token
                earlier.append(pair.get(key, NOWHERE))
                pair[key] = i
            else:
                earlier.append(NOWHERE)
        self._known = end
