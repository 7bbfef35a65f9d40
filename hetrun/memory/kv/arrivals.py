"""Rows of keys and values that a device has written and the host's cache does not have yet.

A pass would have to wait for them, and few things read them: forks, files, a backend that attends on the
host. So they come piece by piece while a device computes the next passes, and all at once where something
reads them before that (`KvCache.settle`). Those of a few tokens come with the pass's results, and wait beside
the cache until there are some.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class ArrivedRows(Protocol):
    """Rows of some layers of one group."""

    @property
    def layers(self) -> frozenset[int]:
        """Of which layers."""
        ...

    @property
    def group(self) -> int:
        """Of which group."""
        ...

    def forget(self, first: int, end: int) -> None:
        """These rows are not wanted any more."""
        ...


class Arrival(ArrivedRows, Protocol):
    """Rows that a pass wrote, and that are still on a device."""

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


class DelayedRows(ArrivedRows, Protocol):
    """Rows that have left their device, and wait to be put away."""

    @property
    def has_enough(self) -> bool:
        """Whether they had better be put away when there is time."""
        ...

    def clear(self) -> None:
        """Put them away."""
        ...


class Arrivals:
    """All of them, the oldest first."""

    def __init__(self) -> None:
        self._coming: deque[Arrival] = deque()
        self._waiting: dict[DelayedRows, None] = {}
        self._enough: deque[DelayedRows] = deque()  # those of them that have
        self._layers: Counter[int] = Counter()  # of how many of all these

    def expect(self, arrival: Arrival) -> None:
        """One more."""
        self._coming.append(arrival)
        self._layers.update(arrival.layers)

    def keep(self, waiting: DelayedRows) -> None:
        """There are rows, or more of them, that wait."""
        if waiting not in self._waiting:
            self._waiting[waiting] = None
            self._layers.update(waiting.layers)
        if waiting.has_enough and waiting not in self._enough:
            self._enough.append(waiting)

    def __bool__(self) -> bool:
        return bool(self._coming or self._waiting)

    def touch(self, layers: frozenset[int]) -> bool:
        """Whether rows of these layers are not at home yet."""
        return any([self._layers.get(layer) for layer in layers])

    def send(self) -> bool:
        """Have as much as there is room for on its way, the oldest first; whether that is everything."""
        return all(arrival.send() for arrival in self._coming) if self._coming else True

    def advance(self, wait: bool) -> bool:
        """Put some rows away; False where there are none or, without `wait`, none that are there and worth
        it. Those that wait go first: whatever happens to a device, they are there."""
        if self._waiting and (wait or self._enough):
            self._put_away(self._enough[0] if self._enough else next(iter(self._waiting)))
            return True
        if not self._coming:
            return False
        oldest = self._coming[0]
        moved = oldest.advance(wait)
        if oldest.over:
            self._coming.popleft()
            self._layers.subtract(oldest.layers)
        return moved

    def _put_away(self, waiting: DelayedRows) -> None:
        if waiting in self._enough:
            self._enough.remove(waiting)
        del self._waiting[waiting]
        self._layers.subtract(waiting.layers)
        waiting.clear()

    def forget(self, group: int, first: int, end: int) -> None:
        """These rows of a group are not wanted any more."""
        for rows in (*self._coming, *self._waiting):
            if rows.group == group:
                rows.forget(first, end)

    def lost(self) -> list[tuple[int, Ints]]:
        """What will not come any more, by group: the device has failed."""
        found = [(arrival.group, arrival.left()) for arrival in self._coming]
        for arrival in self._coming:
            self._layers.subtract(arrival.layers)
        self._coming.clear()
        return found
