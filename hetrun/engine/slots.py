"""Numbers of places, as clients know them: which are taken, and what was last computed in each.

The engine itself needs no numbers: keys and values of a request that has ended are an entry of the prefix
cache, with which any other request can begin. A number says whose tokens are saved to a file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetrun.memory.kv.radix_tree import Tokens


class Slots:
    """On the engine's thread."""

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}  # number -> the request there
        self._last: dict[int, Tokens] = {}

    def is_taken(self, number: int | None) -> bool:
        """Whether a request has this place now."""
        return number in self._taken

    def take(self, request: int, number: int | None) -> int:
        """The place that a request wants, which must be free, or the first free one."""
        if number is None:
            number = next(i for i in range(len(self._taken) + 1) if i not in self._taken)
        self._taken[number] = request
        return number

    def left(self, number: int, tokens: Sequence[int]) -> None:
        """A request has left its place, with these tokens computed; without any nothing is known of it."""
        self._taken.pop(number, None)
        self.put(number, np.array(tokens, np.int32))

    def last(self, number: int) -> Tokens:
        """What was computed last in a place; empty: nothing."""
        return self._last.get(number, np.zeros(0, np.int32))

    def put(self, number: int, tokens: Tokens) -> None:
        """A place holds these tokens."""
        if len(tokens):
            self._last[number] = tokens
        else:
            self._last.pop(number, None)
