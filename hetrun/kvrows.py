"""Which rows of the KV tables a sequence has: numbers only, the memory is `hetrun.kv`'s.

Layers that see equally far share one numbering of rows, their group. Those that see everything keep it in
blocks that sequences share; those with a window keep little more than the window, in one run of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import BudgetError

BLOCK = 32
SLACK = 64  # tokens kept behind a window, so that so many can be taken back

RowIndex = NDArray[np.int64]
Move = Callable[[int, int, int], None]  # from a row, to a row, so many; they may overlap


@dataclass(frozen=True, slots=True)
class KvView:
    """Where `length` tokens of a sequence lie that follow each other."""

    first: int  # the lowest row of any token
    length: int
    blocks: tuple[int, ...] | None = None  # those that the rows lie in, where they are not one run

    @property
    def contiguous(self) -> bool:
        """Whether the rows follow each other as the tokens do."""
        return self.blocks is None

    @property
    def end(self) -> int:
        """The row behind the highest row of any token."""
        return self.first + self.length if self.blocks is None else (max(self.blocks) + 1) * BLOCK

    @property
    def rows(self) -> RowIndex:
        """The row of each token."""
        if self.blocks is None:
            return np.arange(self.first, self.first + self.length)
        return rows_of(self.blocks, 0, self.length)


def rows_of(blocks: Sequence[int], a: int, b: int) -> RowIndex:
    """The rows of positions a to b of a sequence that holds these blocks."""
    if b == a + 1:  # a decode step: not worth four passes of numpy
        return np.array([blocks[a // BLOCK] * BLOCK + a % BLOCK], np.int64)
    first = a // BLOCK
    positions = np.arange(a, b, dtype=np.int64)
    mine = np.array(blocks[first : -(-b // BLOCK)], np.int64)
    return mine[positions // BLOCK - first] * BLOCK + positions % BLOCK


def region_rows(window: int, context: int, most_tokens: int) -> int:
    """Rows that a sequence of `context` tokens needs; with a window that, and what comes in at once.

    There is room for an eighth of the window at least, so that it moves seldom.
    """
    if window:
        context = min(context, window + SLACK + max(most_tokens, window // 8))
    return -(-context // BLOCK) * BLOCK


class Group(ABC):
    """Who has which row, for layers that see equally far; how long a sequence is, the cache says."""

    window: int  # how many tokens one sees, itself included; 0: all
    rows: int  # of each table

    @property
    @abstractmethod
    def used_rows(self) -> int:
        """Rows that sequences have."""

    @abstractmethod
    def alloc(self, seq: int) -> None:
        """A new, empty sequence."""

    @abstractmethod
    def extend(self, seq: int, length: int, n: int) -> RowIndex:
        """Rows for n more tokens; nothing that can be read changes if there is no room."""

    @abstractmethod
    def fork(self, seq: int, new: int, length: int) -> None:
        """Give a new, empty sequence the tokens of another."""

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


def _full(rows: int) -> BudgetError:
    return BudgetError(f"the KV cache of {rows} tokens is full; ask for fewer sequences or a smaller --ctx")


def too_long(rows: int) -> BudgetError:
    """What a sequence that wants more tokens than there is room for is told."""
    return BudgetError(f"a sequence holds up to {rows} tokens here; ask for more with --ctx")


@dataclass(slots=True)
class _Held:
    """The blocks of one sequence."""

    blocks: list[int]
    seen: KvView | None = None  # the last view; its blocks change once in 32 tokens only


class Blocks(Group):
    """Layers that see everything: blocks of 32 rows, counted by holders, shared where the past is one."""

    window = 0

    def __init__(self, region: int, max_sequences: int, limited: bool, contiguous: bool, move: Move) -> None:
        """`region` blocks are what one sequence of full length takes; `limited`: none may be longer."""
        self.region = region
        self.n_blocks = region * max_sequences
        self.rows = self.n_blocks * BLOCK
        self._limited = limited
        self._contiguous = contiguous
        self._move = move
        self._references = np.zeros(self.n_blocks, np.int32)
        self._held: dict[int, _Held] = {}

    @property
    def used_rows(self) -> int:
        return int(np.count_nonzero(self._references)) * BLOCK

    def alloc(self, seq: int) -> None:
        self._held[seq] = _Held([])

    def extend(self, seq: int, length: int, n: int) -> RowIndex:
        s = self._held[seq]
        # The next token may go into a block that another sequence reads.
        unshare = n > 0 and length % BLOCK != 0 and bool(self._references[s.blocks[-1]] > 1)
        missing = -(-(length + n) // BLOCK) - len(s.blocks)
        if missing or unshare:
            self._check_room(s, missing, missing + unshare)
        if unshare:
            self._unshare_tail(s, length % BLOCK)
        for _ in range(missing):
            s.blocks.append(self._take(s.blocks[-1] + 1 if s.blocks else None))
        return rows_of(s.blocks, length, length + n)

    def fork(self, seq: int, new: int, length: int) -> None:
        parent, child = self._held[seq], self._held[new]
        full = 0 if self._contiguous else length // BLOCK
        child.blocks += parent.blocks[:full]
        self._references[child.blocks] += 1
        copied = length - full * BLOCK  # a part of one block, or a whole run
        if copied:
            here = self.extend(new, full * BLOCK, copied)
            self._move(parent.blocks[full] * BLOCK, int(here[0]), copied)

    def keepable(self, seq: int, n: int) -> bool:
        return True

    def truncate(self, seq: int, n: int) -> None:
        s = self._held[seq]
        keep = -(-n // BLOCK)
        self._references[s.blocks[keep:]] -= 1
        del s.blocks[keep:]
        s.seen = None

    def free(self, seq: int) -> None:
        self.truncate(seq, 0)
        del self._held[seq]

    def view(self, seq: int, a: int, b: int) -> KvView:
        s = self._held[seq]
        seen, held = s.seen, -(-b // BLOCK)
        if seen is None or -(-seen.length // BLOCK) != held:
            blocks = tuple(s.blocks[:held])
            first = min(blocks, default=0)
            run = blocks == tuple(range(first, first + held))
            seen = s.seen = KvView(first * BLOCK, b, None if run else blocks)
        return KvView(seen.first, b, seen.blocks)

    def _check_room(self, s: _Held, growth: int, blocks: int) -> None:
        """Whether a sequence can have `growth` more blocks and the cache can give `blocks`."""
        if self._limited and growth > 0 and len(s.blocks) + growth > self.region:
            raise too_long(self.region * BLOCK)
        if self._contiguous:
            full = growth > 0 and not s.blocks and not len(self._free_regions())
        else:
            full = blocks > int(np.count_nonzero(self._references == 0))
        if full:
            raise _full(self.rows)

    def _take(self, wanted: int | None) -> int:
        """A free block: the wanted one, or where a sequence can grow best."""
        free = wanted is not None and wanted < self.n_blocks and not self._references[wanted]
        block = wanted if wanted is not None and free else self._find_room()
        self._references[block] = 1
        return block

    def _free_regions(self) -> NDArray[np.intp]:
        return np.flatnonzero(~(self._references > 0).reshape(-1, self.region).any(axis=1))

    def _find_room(self) -> int:
        """The beginning of a free region, or else of the longest free run."""
        regions = self._free_regions()
        if len(regions):
            return int(regions[0]) * self.region
        used = (self._references > 0).astype(np.int8)
        edges = np.flatnonzero(np.diff(np.concatenate(([1], used, [1]))))
        starts, ends = edges[::2], edges[1::2]
        return int(starts[np.argmax(ends - starts)])

    def _unshare_tail(self, s: _Held, n: int) -> None:
        """A block of its own for the last n tokens of a sequence."""
        old = s.blocks[-1]
        self._references[old] -= 1
        s.blocks[-1] = self._take(None)
        s.seen = None
        self._move(old * BLOCK, s.blocks[-1] * BLOCK, n)


@dataclass(slots=True)
class _Run:
    """The rows of one sequence: position p lies in row first + p - base."""

    first: int = -1  # of its region; -1: it has none
    base: int = 0  # the oldest position that is kept
    used: int = 0  # rows of the region that were ever written


class Runs(Group):
    """Layers with a window: each sequence is one run of rows in a region of its own; a fork copies it.

    When a region is full, the window and some slack move to its beginning: a copy once in a while, and in
    return a view is always one run, whose last row needs no mask, and memory does not grow.
    """

    def __init__(self, window: int, region: int, max_sequences: int, move: Move) -> None:
        """`region` rows for each sequence."""
        self.window = window
        self.region = region
        self.rows = region * max_sequences
        self._move = move
        self._free = list(range(0, self.rows, region))[::-1]
        self._runs: dict[int, _Run] = {}

    @property
    def used_rows(self) -> int:
        return sum(s.used for s in self._runs.values())

    def alloc(self, seq: int) -> None:
        self._runs[seq] = _Run()

    def extend(self, seq: int, length: int, n: int) -> RowIndex:
        s = self._runs[seq]
        if length + n - s.base > self.region:
            self._make_room(s, length, n)
        if s.first < 0 and n:
            self._settle(s)
        a, end = s.first + length - s.base, length + n - s.base
        s.used = max(s.used, end)
        return np.arange(a, a + n)

    def fork(self, seq: int, new: int, length: int) -> None:
        parent, child = self._runs[seq], self._runs[new]
        if length:
            self._settle(child)
            child.used = min(length - parent.base, self.window - 1 + SLACK)
            child.base = length - child.used
            self._move(parent.first + child.base - parent.base, child.first, child.used)

    def keepable(self, seq: int, n: int) -> bool:
        base = self._runs[seq].base
        return n == 0 or base == 0 or base <= n + 1 - self.window

    def truncate(self, seq: int, n: int) -> None:
        s = self._runs[seq]
        if not n and s.first >= 0:
            self._free.append(s.first)
            self._runs[seq] = _Run()

    def free(self, seq: int) -> None:
        self.truncate(seq, 0)
        del self._runs[seq]

    def view(self, seq: int, a: int, b: int) -> KvView:
        s = self._runs[seq]
        start = max(0, a + 1 - self.window)
        return KvView(max(0, s.first) + start - s.base, b - start)

    def _settle(self, s: _Run) -> None:
        if not self._free:
            raise _full(self.rows)
        s.first = self._free.pop()

    def _make_room(self, s: _Run, length: int, n: int) -> None:
        """Keep what the next token sees, and as much slack as n more tokens leave."""
        held = length - s.base
        keep = min(held, self.window - 1 + SLACK, self.region - n)
        if keep < min(held, self.window - 1):
            raise too_long(self.region)
        self._move(s.first + held - keep, s.first, keep)
        s.base = length - keep
