"""Which rows of the KV tables a sequence has: numbers only, the memory is `hetrun.memory.kv.cache`'s.

Layers that see equally far share one numbering of rows, their group. In each a sequence is one run of rows,
always. Layers that see everything share beginnings: the page table shows the same memory in both runs. Those
with a window keep little more than the window, and a fork copies it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import BudgetError

BLOCK = 32
SLACK = 64  # tokens kept beyond a window, so that this many can be taken back

RowIndex = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KvView:
    """Where `length` tokens of a sequence lie that follow each other, in rows that do."""

    first: int
    length: int

    @property
    def end(self) -> int:
        """The row behind the last."""
        return self.first + self.length

    @property
    def rows(self) -> RowIndex:
        """The row of each token."""
        return np.arange(self.first, self.end)


class RowMemory(Protocol):
    """What groups do with the memory of their rows, in all tables at once."""

    def move(self, source: int, target: int, n: int) -> None:
        """Copy n rows; they may overlap."""
        ...

    def show(self, at: int, rows: int, n: int, keep: int = 0) -> None:
        """From row `at` on, see the memory that row `rows` had at first, n rows of whole pages; the first
        `keep` are written there as they were seen before. OSError where the system cannot."""
        ...

    def drop(self, rows: int, n: int) -> None:
        """Give the memory that these rows had at first back to the system."""
        ...


def region_rows(window: int, context: int, most_tokens: int) -> int:
    """Rows that a sequence of `context` tokens needs; with a window that, and what comes in at once.

    There is room for an eighth of the window at least, so that it moves seldom.
    """
    if window:
        context = min(context, window + SLACK + max(most_tokens, window // 8))
    return -(-context // BLOCK) * BLOCK


class LayerGroup(ABC):
    """Who has which row, for layers that see equally far; how long a sequence is, the cache says."""

    window: int  # how many tokens one sees, itself included; 0: all

    def __init__(self, rows: int) -> None:
        """`rows` rows in each table."""
        self.rows = rows
        # A row's stamp changes when it is about to hold something else, and so do those of the rows behind it
        # in its sequence. So who copied some rows that follow each other sees by that of the last one whether
        # all of them are still good.
        self.stamps = np.zeros(rows, np.int64)
        self._stamp = 0

    def _renew(self, a: int, b: int) -> None:
        """Rows a to b hold something else from now on."""
        self._stamp += 1
        self.stamps[a:b] = self._stamp

    @property
    @abstractmethod
    def used_rows(self) -> int:
        """Rows of memory that sequences have; what several of them see counts once."""

    @property
    @abstractmethod
    def touched_rows(self) -> int:
        """The same, and what sequences had before them and the system was not given back."""

    @abstractmethod
    def alloc(self, seq: int) -> None:
        """A new, empty sequence, for which there must be a region."""

    @abstractmethod
    def wants(self, seq: int, length: int, n: int) -> int:
        """By how many the used rows grow with n more tokens, at most."""

    def copies(self, seq: int, length: int) -> bool:
        """Whether rows are copied to other memory when the sequence gets more tokens."""
        return False

    @abstractmethod
    def extend(self, seq: int, length: int, n: int) -> RowIndex:
        """Rows for n more tokens. BudgetError without room: cut to `length`, it reads as before."""

    @abstractmethod
    def fork_wants(self, seq: int, n: int) -> int:
        """By how many the used rows grow with a fork of n tokens."""

    @abstractmethod
    def fork(self, seq: int, new: int, n: int) -> None:
        """Give a new, empty sequence the first n tokens of another, which must be keepable."""

    @abstractmethod
    def place(self, seq: int, n: int) -> KvView:
        """Rows for a new, empty sequence that begins with n tokens: for those that the next one sees."""

    @abstractmethod
    def keepable(self, seq: int, n: int) -> bool:
        """Whether all that the token at position n sees is still there."""

    @abstractmethod
    def truncate(self, seq: int, n: int) -> None:
        """Forget every token from position n on."""

    @abstractmethod
    def free(self, seq: int) -> None:
        """Give everything back."""

    @abstractmethod
    def view(self, seq: int, a: int, b: int) -> KvView:
        """Where the tokens before position b lie that those at positions a to b see."""

    @abstractmethod
    def trim(self) -> None:
        """Give the system back what no sequence has."""


def too_long(rows: int) -> BudgetError:
    """What a sequence that wants more tokens than there is room for is told."""
    return BudgetError(f"a sequence holds up to {rows} tokens here; ask for more with --ctx")


@dataclass(slots=True)
class _SequenceRows:
    """What one sequence has."""

    first: int  # unit of its region
    units: int = 0


class PagedGroup(LayerGroup):
    """Layers that see everything: a region of addresses for each sequence, and memory behind it by units.

    A unit is the least number of rows whose memory is whole pages in every table. At first each unit of
    addresses shows its own unit of memory. A fork shows that of its parent, whole units only, and both count
    as its holders. A sequence that writes into a unit with another holder gets other memory first.
    """

    window = 0

    def __init__(self, longest: int, unit: int, regions: int, memory: RowMemory, most_runs: int) -> None:
        """Sequences of up to `longest` tokens; 0 as `most_runs`: nothing can be shown twice.

        Every run of units whose memory follows each other is a mapping, of which a process can have only a
        limited number: forks copy rather than make more than `most_runs`.
        """
        self.unit = unit
        self._longest = longest
        self._region = -(-longest // unit)
        super().__init__(regions * self._region * unit)
        self._memory = memory
        self._most_runs = most_runs
        n = regions * self._region
        self._shown = np.arange(n)  # the unit of memory that each unit of addresses shows; -1: unknown
        self._holders = np.zeros(n, np.int32)  # of each unit of memory
        self._touched = np.zeros(n, np.bool_)  # memory that was ever held since the system had it
        self._n_touched = 0
        self._used = 0
        self._runs = 1
        self._free = list(range(0, n, self._region))[::-1]
        self._held: dict[int, _SequenceRows] = {}

    @property
    def used_rows(self) -> int:
        return self._used * self.unit

    @property
    def touched_rows(self) -> int:
        return self._n_touched * self.unit

    def alloc(self, seq: int) -> None:
        """In a region whose memory no other sequence sees, if there is one."""
        size = self._region
        alone = (first for first in reversed(self._free) if not self._holders[first : first + size].any())
        first = next(alone, self._free[-1])
        self._free.remove(first)
        self._held[seq] = _SequenceRows(first)

    def wants(self, seq: int, length: int, n: int) -> int:
        if not n:
            return 0
        s = self._held[seq]
        return (self._units(length + n) - s.units + self._is_shared(s, length)) * self.unit

    def copies(self, seq: int, length: int) -> bool:
        return self._is_shared(self._held[seq], length)

    def extend(self, seq: int, length: int, n: int) -> RowIndex:
        s = self._held[seq]
        if length + n > self._longest:
            raise too_long(self._longest)
        if n and not s.units:
            self._go_home(s.first, s.first + self._region)
        if n and self._is_shared(s, length):
            self._unshare(s.first + s.units - 1, length % self.unit)
        for _ in range(self._units(length + n) - s.units):
            self._take(s.first + s.units)
            s.units += 1
        a = s.first * self.unit + length
        self._renew(a, a + n)
        return np.arange(a, a + n)

    def fork_wants(self, seq: int, n: int) -> int:
        return (self._units(n) - self._shareable(seq, n)) * self.unit

    def fork(self, seq: int, new: int, n: int) -> None:
        parent, child = self._held[seq], self._held[new]
        shared = self._shareable(seq, n)
        self._go_home(child.first + shared, child.first + self._region)
        try:
            for at, memory, units in self._pieces(parent.first, parent.first + shared):
                self._show(child.first + at - parent.first, memory, units)
        except OSError:  # too many mappings in this process: then all is copied
            shared = 0
        child.units = shared
        self._holders[self._shown[child.first : child.first + shared]] += 1
        whole = shared * self.unit
        self._renew(child.first * self.unit, child.first * self.unit + whole)
        self.extend(new, whole, n - whole)
        self._memory.move(parent.first * self.unit + whole, child.first * self.unit + whole, n - whole)

    def place(self, seq: int, n: int) -> KvView:
        self.extend(seq, 0, n)
        return self.view(seq, n, n)

    def keepable(self, seq: int, n: int) -> bool:
        return True

    def truncate(self, seq: int, n: int) -> None:
        s, keep = self._held[seq], self._units(n)
        if keep < s.units:
            left = self._shown[s.first + keep : s.first + s.units]
            alone = int(np.count_nonzero(self._holders[left] == 1))
            self._holders[left] -= 1  # as a whole or, without memory for it, not at all
            self._used -= alone
            s.units = keep

    def free(self, seq: int) -> None:
        self.truncate(seq, 0)
        self._free.append(self._held.pop(seq).first)

    def view(self, seq: int, a: int, b: int) -> KvView:
        return KvView(self._held[seq].first * self.unit, b)

    def trim(self) -> None:
        left = np.flatnonzero(self._touched & (self._holders == 0))
        self._touched[left] = False
        self._n_touched -= len(left)
        for lo, hi in _runs_of(left):
            self._memory.drop(int(left[lo]) * self.unit, (hi - lo) * self.unit)

    def _units(self, tokens: int) -> int:
        return -(-tokens // self.unit)

    def _is_shared(self, s: _SequenceRows, length: int) -> bool:
        """Whether the next token would go into a unit that another sequence sees."""
        return length % self.unit != 0 and bool(self._holders[self._shown[s.first + s.units - 1]] > 1)

    def _shareable(self, seq: int, n: int) -> int:
        """The units of a sequence's first n tokens that a fork shows and does not copy."""
        first, units = self._held[seq].first, n // self.unit
        new = sum(1 for _ in self._pieces(first, first + units)) + 1
        return units if self._runs + new <= self._most_runs else 0

    def _pieces(self, a: int, b: int) -> Iterator[tuple[int, int, int]]:
        """Units a to b of addresses: where each run of memory begins, where it is shown, how long it is."""
        shown = self._shown[a:b]
        for lo, hi in _runs_of(shown):
            yield a + lo, int(shown[lo]), hi - lo

    def _go_home(self, a: int, b: int) -> None:
        """Have units a to b of addresses show their own memory again, as far as no sequence has it."""
        own = np.arange(a, b)
        away = own[(self._shown[a:b] != own) & (self._holders[a:b] == 0)]
        for lo, hi in _runs_of(away):
            self._show_or_fail(int(away[lo]), int(away[lo]), hi - lo)

    def _take(self, at: int) -> None:
        """Give a unit of addresses memory that no sequence has."""
        memory = int(self._shown[at])
        if memory < 0 or self._holders[memory]:
            memory = self._spare(at)
            self._show_or_fail(at, memory, 1)
        self._hold(memory)

    def _hold(self, memory: int) -> None:
        self._holders[memory] = 1
        self._n_touched += not self._touched[memory]
        self._touched[memory] = True
        self._used += 1

    def _spare(self, at: int) -> int:
        """A unit of memory that no sequence has: its own, or that of a region that is used late."""
        place = at % self._region
        for memory in (at, *(first + place for first in self._free)):
            if not self._holders[memory]:
                return memory
        return int(np.flatnonzero(self._holders == 0)[-1])

    def _unshare(self, at: int, keep: int) -> None:
        """Memory of its own for a unit of which the first rows are kept."""
        old, new = int(self._shown[at]), self._spare(at)
        try:
            self._show(at, new, 1, keep)
        except OSError as e:
            self._show(at, old, 1)
            raise _no_mapping() from e
        self._holders[old] -= 1
        self._hold(new)

    def _show_or_fail(self, at: int, memory: int, n: int) -> None:
        try:
            self._show(at, memory, n)
        except OSError as e:
            raise _no_mapping() from e

    def _show(self, at: int, memory: int, n: int, keep: int = 0) -> None:
        """Have n units of addresses show other memory, in every table or, where that fails, who knows."""
        here = slice(max(0, at - 1), at + n + 1)
        before = _breaks(self._shown[here])
        self._shown[at : at + n] = -1
        unit = self.unit
        try:
            self._memory.show(at * unit, memory * unit, n * unit, keep)
            self._shown[at : at + n] = np.arange(memory, memory + n)
        finally:
            self._runs += _breaks(self._shown[here]) - before


def _no_mapping() -> BudgetError:
    return BudgetError(
        "the system has no more mappings for the KV cache; ask for fewer sequences or raise vm.max_map_count"
    )


def _breaks(units: NDArray[np.int64]) -> int:
    """How often units do not follow each other."""
    return int(np.count_nonzero(np.diff(units) != 1))


def _runs_of(units: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Where in a list of units the runs are in which each follows the one before."""
    if len(units):
        edges = [0, *(np.flatnonzero(np.diff(units) != 1) + 1).tolist(), len(units)]
        yield from pairwise(edges)
