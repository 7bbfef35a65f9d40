"""A cache for what follows from objects that are slow to compare: found again by identity, and bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

CAPACITY = 4096  # objects


class IdentityCache(Generic[K, V]):
    """Values made of objects; the objects are kept with them, so that no other gets the same id meanwhile."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """`capacity`: of more objects, those are forgotten that were not asked for the longest."""
        self._capacity = capacity
        self._found: OrderedDict[int, tuple[K, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """The value that was made of exactly this object; the first time it is made."""
        found = self._found.get(id(key))
        if found is not None:
            self._found.move_to_end(id(key))
            return found[1]
        value = make(key)
        self._found[id(key)] = key, value
        if len(self._found) > self._capacity:
            self._found.popitem(last=False)
        return value
