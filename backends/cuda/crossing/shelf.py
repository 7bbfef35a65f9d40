"""Rows of keys and values that have come home with the results of a few tokens: they wait on the host until
there are enough of them to be worth putting away, which costs as much for one row as for some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetrun.backend import Ints
from hetrun.backends.cuda.memory import Bytes
from hetrun.memory.kv.cache import KvTable

ENOUGH = 32  # rows


@dataclass(frozen=True, slots=True)
class Plane:
    """The K or the V rows of one layer: the host's, and where they begin in a slab and in a packed row."""

    table: KvTable
    at: int
    packed_at: int

    @property
    def size(self) -> int:
        """Bytes of a row, of these heads."""
        return int(self.table.raw.shape[1])


def put_away(planes: Sequence[Plane], rows: Ints, packed: Bytes) -> None:
    """Packed rows, into the host's cache; those that follow each other are copied at once."""
    n = len(rows)
    if not n:
        return
    follow = rows[-1] - rows[0] == n - 1 and bool((np.diff(rows) == 1).all())
    target = slice(int(rows[0]), int(rows[0]) + n) if follow else rows
    for plane in planes:
        plane.table.raw[target] = packed[:, plane.packed_at : plane.packed_at + plane.size]


class SlabShelf:
    """The rows of one set of slabs that wait."""

    def __init__(
        self, layers: frozenset[int], group: int, planes: Sequence[Plane], stamps: Ints, enough: int
    ) -> None:
        """`stamps` are those of the cache: rows that have got another one meanwhile are not put away."""
        self.layers, self.group = layers, group
        self._planes, self._current, self._enough = planes, stamps, enough
        self._rows, self._stamps = np.empty(2 * enough, np.int64), np.empty(2 * enough, np.int64)
        size = sum(plane.size for plane in planes)
        self._packed = np.empty((2 * enough, size), np.uint8)
        self._n = 0

    def add(self, rows: Ints, stamps: Ints, packed: Bytes) -> None:
        """Rows of a pass, `enough` at most."""
        a, b = self._n, self._n + len(rows)
        if b > len(self._rows):
            self.clear()
            a, b = 0, len(rows)
        self._rows[a:b], self._stamps[a:b], self._packed[a:b] = rows, stamps, packed
        self._n = b

    @property
    def has_enough(self) -> bool:
        """Whether they had better be put away when there is time."""
        return self._n >= self._enough

    def clear(self) -> None:
        """Put all of them away."""
        n, self._n = self._n, 0
        rows, packed = self._rows[:n], self._packed[:n]
        good = self._current[rows] == self._stamps[:n]
        put_away(self._planes, *((rows, packed) if good.all() else (rows[good], packed[good])))

    def forget(self, first: int, end: int) -> None:
        """These rows are not wanted any more."""
        rows = self._rows[: self._n]
        self._stamps[: self._n][(rows >= first) & (rows < end)] = -1
