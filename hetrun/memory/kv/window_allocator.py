"""Rows of layers with a window: each sequence keeps little more than it, in one run that moves along."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetrun.memory.kv.paged_allocator import SLACK, KvView, LayerGroup, RowIndex, RowMemory, too_long


@dataclass(slots=True)
class _Run:
    """The rows of one sequence: position p lies in row first + p - base."""

    first: int  # of its region
    base: int = 0  # the oldest position that is kept
    used: int = 0  # rows of the region that were ever written


class Runs(LayerGroup):
    """Layers with a window: each sequence is one run of rows in a region of its own; a fork copies it.

    When a region is full, the window and some slack move to its beginning: a copy once in a while, and in
    return a view is always one run, whose last row needs no mask, and memory does not grow.
    """

    def __init__(self, window: int, region: int, regions: int, memory: RowMemory) -> None:
        """`region` rows for each sequence."""
        super().__init__(region * regions)
        self.window = window
        self.region = region
        self._memory = memory
        self._free = list(range(0, self.rows, region))[::-1]
        self._touched: dict[int, int] = {}  # rows of each region that were written since the system had it
        self._runs: dict[int, _Run] = {}

    @property
    def used_rows(self) -> int:
        return sum(s.used for s in self._runs.values())

    @property
    def touched_rows(self) -> int:
        return sum(self._touched.values())

    def alloc(self, seq: int) -> None:
        self._runs[seq] = _Run(self._free.pop())

    def wants(self, seq: int, length: int, n: int) -> int:
        s = self._runs[seq]
        return max(0, min(self.region, length + n - s.base) - s.used)

    def extend(self, seq: int, length: int, n: int) -> RowIndex:
        s = self._runs[seq]
        if length + n - s.base > self.region:
            self._make_room(s, length, n)
        a = s.first + length - s.base
        self._use(s, length + n - s.base)
        self._renew(a, a + n)
        return np.arange(a, a + n)

    def fork_wants(self, seq: int, n: int) -> int:
        return self._kept(self._runs[seq], n)

    def fork(self, seq: int, new: int, n: int) -> None:
        parent, child = self._runs[seq], self._runs[new]
        self._use(child, self._kept(parent, n))
        child.base = n - child.used
        self._renew(child.first, child.first + child.used)
        self._memory.move(parent.first + child.base - parent.base, child.first, child.used)

    def place(self, seq: int, n: int) -> KvView:
        s = self._runs[seq]
        self._use(s, min(n, self.window - 1))
        s.base = n - s.used
        self._renew(s.first, s.first + s.used)
        return self.view(seq, n, n)

    def keepable(self, seq: int, n: int) -> bool:
        base = self._runs[seq].base
        return n == 0 or base == 0 or base <= n + 1 - self.window

    def truncate(self, seq: int, n: int) -> None:
        if not n:
            self._runs[seq] = _Run(self._runs[seq].first)

    def free(self, seq: int) -> None:
        self._free.append(self._runs.pop(seq).first)

    def view(self, seq: int, a: int, b: int) -> KvView:
        s = self._runs[seq]
        start = max(0, a + 1 - self.window)
        return KvView(s.first + start - s.base, b - start)

    def trim(self) -> None:
        used = {s.first: s.used for s in self._runs.values()}
        for first, rows in self._touched.items():
            keep = used.get(first, 0)
            self._memory.drop(first + keep, rows - keep)
        self._touched = used

    def _kept(self, s: _Run, n: int) -> int:
        """How many of a sequence's first n tokens a fork copies."""
        return max(0, min(n - s.base, self.window - 1 + SLACK))

    def _use(self, s: _Run, rows: int) -> None:
        """The first rows of a sequence's region are about to be written."""
        if rows > s.used:
            s.used = rows
            self._touched[s.first] = max(rows, self._touched.get(s.first, 0))

    def _make_room(self, s: _Run, length: int, n: int) -> None:
        """Keep what the next token sees, and as much slack as n more tokens leave."""
        held = length - s.base
        keep = min(held, self.window - 1 + SLACK, self.region - n)
        if keep < min(held, self.window - 1):
            raise too_long(self.region)
        self._renew(s.first, s.first + keep)
        self._memory.move(s.first + held - keep, s.first, keep)
        s.base = length - keep
