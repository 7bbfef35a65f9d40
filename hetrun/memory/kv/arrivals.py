"""Rows of keys and values that a device has written and the host does not have yet.

A pass would have to wait for them, and few things read them: forks, files, a backend that attends on the
host. So they come piece by piece while a device computes the next passes, and all at once where something
reads them before that (`KvCache.settle`).
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Arrival(Protocol):
    """Rows that a pass wrote, of some layers of one group."""

    @property
    def layers(self) -> frozenset[int]:
        """Of which layers."""
        ...

    @property
    def group(self) -> int:
        """Of which group."""
        ...

    def send(self) -> bool:
        """Have as much of it on its way as there is room for; False where there is room for no more."""
        ...

    def advance(self, wait: bool) -> bool:
        """Put one piece away; False where none is there yet, unless it is to `wait`."""
        ...

    @property
    def over(self) -> bool:
        """Whether all of it is there."""
        ...

    def left(self) -> Ints:
        """Rows that are not there."""
        ...

    def forget(self, first: int, end: int) -> None:
        """These rows are not wanted any more."""
        ...


class Arrivals:
    """All of them, the oldest first."""

    def __init__(self) -> None:
        self._coming: deque[Arrival] = deque()

    def expect(self, arrival: Arrival) -> None:
        """One more."""
        self._coming.append(arrival)

    def __bool__(self) -> bool:
        return bool(self._coming)

    def touch(self, layers: frozenset[int]) -> bool:
        """Whether rows of these layers are still on their way."""
        return any(not layers.isdisjoint(arrival.layers) for arrival in self._coming)

    def send(self) -> bool:
        """Have as much as there is room for on its way, the oldest first; whether that is everything."""
        return all(arrival.send() for arrival in self._coming)

    def advance(self, wait: bool) -> bool:
        """Put one piece away; False where nothing is on its way, or not there yet, unless it is to `wait`."""
        if not self._coming:
            return False
        oldest = self._coming[0]
        moved = oldest.advance(wait)
        if oldest.over:
            self._coming.popleft()
        return moved

    def forget(self, group: int, first: int, end: int) -> None:
        """These rows of a group are not wanted any more."""
        for arrival in self._coming:
            if arrival.group == group:
                arrival.forget(first, end)

    def lost(self) -> list[tuple[int, Ints]]:
        """What will not come any more, by group: the device has failed."""
        found = [(arrival.group, arrival.left()) for arrival in self._coming]
        self._coming.clear()
        return found
