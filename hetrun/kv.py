"""The key-value cache: host memory for the K and V rows of every sequence, one layout for all backends.

Each layer has two tables of rows (K and V); a row is one token's n_kv_heads x head_dim numbers in one type.
Address space is reserved for all rows at once and the system gives memory when a row is first written, so a
table never moves and a backend may keep its address. Which rows a sequence has is said by the groups of
`hetrun.kvrows`, one for all layers that see equally far.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import BudgetError
from hetrun.graph import KvShape
from hetrun.kvrows import BLOCK, Blocks, Group, KvView, RowIndex, Runs, region_rows
from hetrun.quant import QuantType


@dataclass(frozen=True, slots=True)
class KvTable:
    """The K or the V rows of one layer."""

    raw: NDArray[np.uint8]  # [rows, bytes of these heads]
    quant: QuantType
    n_heads: int
    head_dim: int

    @property
    def address(self) -> int:
        """Where the first row lies."""
        return int(self.raw.ctypes.data)

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return int(self.raw.strides[0])

    def heads(self, first: int, n: int) -> KvTable:
        """The same rows, and of their columns those of some heads; a head is whole blocks of the type."""
        if n == self.n_heads:
            return self
        size = self.quant.row_bytes(self.head_dim)
        return KvTable(self.raw[:, first * size : (first + n) * size], self.quant, n, self.head_dim)

    def read(self, rows: RowIndex) -> NDArray[np.float32]:
        """Rows as float32 [n, n_heads, head_dim]."""
        flat = self.quant.dequantise(self.raw[rows], self.n_heads * self.head_dim)
        return flat.reshape(len(rows), self.n_heads, self.head_dim)

    def write(self, rows: RowIndex, x: NDArray[np.float32]) -> None:
        """Store one row of n_heads * head_dim numbers for each index."""
        self.raw[rows] = self.quant.quantise(np.ascontiguousarray(x))


def _move(tables: Sequence[KvTable], source: int, target: int, n: int) -> None:
    """Copy n rows from `source` on to `target` in each table; they may overlap, which numpy would buffer."""
    for table in tables:
        size = table.row_bytes
        ctypes.memmove(table.address + target * size, table.address + source * size, n * size)


def token_bytes(shape: KvShape, quant: QuantType) -> int:
    """Memory of one token's K and V in one layer."""
    return 2 * quant.row_bytes(shape.n_heads * shape.head_dim)


def sequence_bytes(shapes: Mapping[int, KvShape], quant: QuantType, most_tokens: int, context: int) -> int:
    """Memory of one sequence of `context` tokens, of which `most_tokens` come at once."""
    return sum(
        token_bytes(s, quant) * min(context, region_rows(s.window, context, most_tokens))
        for s in shapes.values()
    )


class KvCache:
    """The sequences, their rows in each group of layers, and the memory behind them."""

    def __init__(
        self,
        shapes: Mapping[int, KvShape],
        quant: QuantType,
        context: int,
        max_sequences: int,
        most_tokens: int,
        contiguous: bool = False,
    ) -> None:
        """Address space for `max_sequences` of `context` tokens, of which each gets `most_tokens` at once.

        With `contiguous` every sequence is one run of rows for ever: nothing is shared, a fork copies all.
        """
        self.quant = quant
        whole = region_rows(0, context, most_tokens)
        # A window that no sequence outgrows is none; then no sequence may become longer than that.
        windows = {layer: s.window if s.window < whole else 0 for layer, s in shapes.items()}
        limited = contiguous or any(s.window and not windows[layer] for layer, s in shapes.items())
        order = sorted(set(windows.values()))
        self._group_of = {layer: order.index(window) for layer, window in windows.items()}
        self.tables: dict[int, tuple[KvTable, KvTable]] = {}
        self._group_tables: list[list[KvTable]] = [[] for _ in order]
        self.groups: tuple[Group, ...] = tuple(
            Runs(window, region_rows(window, context, most_tokens), max_sequences, partial(_move, tables))
            if window
            else Blocks(whole // BLOCK, max_sequences, limited, contiguous, partial(_move, tables))
            for window, tables in zip(order, self._group_tables, strict=True)
        )
        for layer, shape in shapes.items():
            group = self._group_of[layer]
            rows = self.groups[group].rows
            self.tables[layer] = self._table(shape, rows), self._table(shape, rows)
            self._group_tables[group] += self.tables[layer]
        # A window moves along: what comes in at once must leave room for what it sees.
        self.most_at_once = most_tokens if any(order) else sys.maxsize
        self._lengths: dict[int, int] = {}
        self._ids = count()

    def group(self, layer: int) -> int:
        """The number of a layer's group."""
        return self._group_of[layer]

    @property
    def used_bytes(self) -> int:
        """Memory of the rows that are in use."""
        return sum(
            group.used_rows * sum(t.row_bytes for t in tables)
            for group, tables in zip(self.groups, self._group_tables, strict=True)
        )

    def heads(self, layer: int, first: int, n: int) -> tuple[KvTable, KvTable]:
        """K and V of some heads of a layer."""
        keys, values = self.tables[layer]
        return keys.heads(first, n), values.heads(first, n)

    def alloc(self) -> int:
        """A new, empty sequence."""
        seq = next(self._ids)
        self._lengths[seq] = 0
        for g in self.groups:
            g.alloc(seq)
        return seq

    def length(self, seq: int) -> int:
        """Tokens that a sequence holds."""
        return self._lengths[seq]

    def extend(self, seq: int, n: int) -> tuple[RowIndex, ...]:
        """Rows for the next n tokens in each group, `most_at_once` at most; nothing changes without room."""
        if n > self.most_at_once:
            raise ValueError(f"{n} tokens are more than the {self.most_at_once} that may come at once")
        length = self._lengths[seq]
        rows: list[RowIndex] = []
        try:
            for g in self.groups:
                rows.append(g.extend(seq, length, n))
        except BudgetError:
            for g in self.groups[: len(rows)]:
                g.truncate(seq, length)
            raise
        self._lengths[seq] = length + n
        return tuple(rows)

    def fits(self, chunks: Sequence[tuple[int, int]]) -> bool:
        """Whether there is room for so many more tokens of each of these sequences."""
        return True

    def shareable(self, seq: int, n: int) -> int:
        """How many of a sequence's first n tokens a new one could begin with."""
        return n if n == self._lengths[seq] else 0

    def fork(self, seq: int, n: int | None = None) -> int:
        """A new sequence with the same tokens: full blocks are shared, a partial one and windows copied."""
        if n is not None and n != self._lengths[seq]:
            raise ValueError(f"sequence {seq} has {self._lengths[seq]} tokens and is only forked as a whole")
        length, new = self._lengths[seq], self.alloc()
        try:
            for g in self.groups:
                g.fork(seq, new, length)
        except BudgetError:
            self.free(new)
            raise
        self._lengths[new] = length
        return new

    def keepable(self, seq: int, n: int) -> bool:
        """Whether a sequence can be cut to n tokens: to 0 always, else while what the next one sees is there.

        The last `kvrows.SLACK` tokens can always be taken back, and those that came in at once.
        """
        return 0 <= n <= self._lengths[seq] and all(g.keepable(seq, n) for g in self.groups)

    def truncate(self, seq: int, n: int) -> None:
        """Forget every token from position n on, which must be keepable."""
        if not self.keepable(seq, n):
            length = self._lengths[seq]
            moved = "; its windows have moved on" if 0 <= n <= length else ""
            raise ValueError(f"sequence {seq} has {length} tokens and cannot be cut to {n}{moved}")
        for g in self.groups:
            g.truncate(seq, n)
        self._lengths[seq] = n

    def free(self, seq: int) -> None:
        """Give everything back."""
        del self._lengths[seq]
        for g in self.groups:
            g.free(seq)

    def views(self, seq: int, a: int, b: int) -> tuple[KvView, ...]:
        """Where, in each group, the tokens lie that those at positions a to b of a sequence see."""
        return tuple([g.view(seq, a, b) for g in self.groups])

    def _table(self, shape: KvShape, rows: int) -> KvTable:
        row_bytes = self.quant.row_bytes(shape.n_heads * shape.head_dim)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        # The array keeps the mapping alive, and gives it back when nobody needs the table any more.
        try:
            memory = mmap.mmap(-1, max(rows * row_bytes, mmap.PAGESIZE), flags=flags)
        except (OSError, OverflowError) as e:
            raise BudgetError(
                f"the system has no address space for {rows} rows of keys and values; use a smaller --ctx"
            ) from e
        raw = np.frombuffer(memory, np.uint8, rows * row_bytes).reshape(rows, row_bytes)
        return KvTable(raw, self.quant, shape.n_heads, shape.head_dim)
