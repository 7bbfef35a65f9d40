"""The key-value cache: host memory in blocks of 32 tokens, counted by holders, one layout for all backends.

Each layer has two tables of rows (K and V); a row is one token's n_kv_heads x head_dim numbers in one type.
A block is the same 32 rows in all of those tables. Address space is reserved for all rows at once and the
system gives memory when a row is first written, so a table never moves and a backend may keep its address.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import BudgetError
from hetrun.graph import KvShape
from hetrun.quant import QuantType

BLOCK = 32

RowIndex = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KvTable:
    """The K or the V rows of one layer."""

    raw: NDArray[np.uint8]  # [rows, row_bytes]
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
        return int(self.raw.shape[1])

    def read(self, rows: RowIndex) -> NDArray[np.float32]:
        """Rows as float32 [n, n_heads, head_dim]."""
        flat = self.quant.dequantise(self.raw[rows], self.n_heads * self.head_dim)
        return flat.reshape(len(rows), self.n_heads, self.head_dim)

    def write(self, rows: RowIndex, x: NDArray[np.float32]) -> None:
        """Store one row of n_heads * head_dim numbers for each index."""
        self.raw[rows] = self.quant.quantise(np.ascontiguousarray(x))


@dataclass(frozen=True, slots=True)
class KvView:
    """Where the first `length` tokens of a sequence lie: in its blocks, which may follow each other."""

    blocks: tuple[int, ...]
    length: int
    contiguous: bool

    @property
    def first(self) -> int:
        """The lowest row of any token."""
        if self.contiguous:
            return self.blocks[0] * BLOCK if self.blocks else 0
        return min(self.blocks) * BLOCK

    @property
    def end(self) -> int:
        """The row behind the highest row of any token."""
        return self.first + self.length if self.contiguous else (max(self.blocks) + 1) * BLOCK

    @property
    def rows(self) -> RowIndex:
        """The row of each position."""
        return rows_of(self.blocks, 0, self.length)


def rows_of(blocks: Sequence[int], a: int, b: int) -> RowIndex:
    """The rows of positions a to b of a sequence that holds these blocks."""
    if b == a + 1:  # a decode step: not worth four passes of numpy
        return np.array([blocks[a // BLOCK] * BLOCK + a % BLOCK], np.int64)
    first = a // BLOCK
    positions = np.arange(a, b, dtype=np.int64)
    mine = np.array(blocks[first : -(-b // BLOCK)], np.int64)
    return mine[positions // BLOCK - first] * BLOCK + positions % BLOCK


@dataclass(slots=True)
class _Sequence:
    blocks: list[int]
    length: int
    seen: KvView | None = None  # the last view; its blocks change once in 32 tokens only


class KvCache:
    """Blocks, who holds them, and the memory behind them."""

    def __init__(
        self,
        shapes: Mapping[int, KvShape],
        quant: QuantType,
        context: int,
        max_sequences: int,
        contiguous: bool = False,
    ) -> None:
        """Address space for `max_sequences` of `context` tokens.

        With `contiguous` every sequence is one run of rows for ever: nothing is shared, a fork copies all.
        """
        self.quant = quant
        self._contiguous = contiguous
        self.region = -(-context // BLOCK)  # blocks that one sequence of full length takes
        self.n_blocks = self.region * max_sequences
        self._references = np.zeros(self.n_blocks, np.int32)
        self._sequences: dict[int, _Sequence] = {}
        self._ids = count()
        self.tables = {layer: (self._table(shape), self._table(shape)) for layer, shape in shapes.items()}

    @property
    def bytes_per_token(self) -> int:
        """Memory that one token takes in all layers."""
        return sum(table.row_bytes for pair in self.tables.values() for table in pair)

    @property
    def used_bytes(self) -> int:
        """Memory of the blocks that are in use."""
        return int(np.count_nonzero(self._references)) * BLOCK * self.bytes_per_token

    @property
    def rows(self) -> int:
        """Rows of each table."""
        return self.n_blocks * BLOCK

    def alloc(self) -> int:
        """A new, empty sequence."""
        seq = next(self._ids)
        self._sequences[seq] = _Sequence([], 0)
        return seq

    def length(self, seq: int) -> int:
        """Tokens that a sequence holds."""
        return self._sequences[seq].length

    def extend(self, seq: int, n: int) -> RowIndex:
        """Rows for the next n tokens; nothing changes if there is no room."""
        s = self._sequences[seq]
        unshare = n > 0 and self._tail_is_shared(s)
        missing = -(-(s.length + n) // BLOCK) - len(s.blocks)
        self._check_room(s, missing, missing + unshare)
        if unshare:
            self._unshare_tail(s)
        for _ in range(missing):
            s.blocks.append(self._take(s.blocks[-1] + 1 if s.blocks else None))
        rows = rows_of(s.blocks, s.length, s.length + n)
        s.length += n
        return rows

    def fork(self, seq: int) -> int:
        """A new sequence with the same tokens: full blocks are shared, a partial one is copied."""
        parent, new = self._sequences[seq], self.alloc()
        full = 0 if self._contiguous else parent.length // BLOCK
        child = self._sequences[new] = _Sequence(parent.blocks[:full], full * BLOCK)
        self._references[child.blocks] += 1
        try:
            here = self.extend(new, parent.length - child.length)
        except BudgetError:
            self.free(new)
            raise
        self._copy(rows_of(parent.blocks, full * BLOCK, parent.length), here)
        return new

    def truncate(self, seq: int, n: int) -> None:
        """Forget every token from position n on."""
        s = self._sequences[seq]
        if not 0 <= n <= s.length:
            raise ValueError(f"sequence {seq} has {s.length} tokens and cannot be cut to {n}")
        keep = -(-n // BLOCK)
        self._references[s.blocks[keep:]] -= 1
        del s.blocks[keep:]
        s.length = n
        s.seen = None

    def free(self, seq: int) -> None:
        """Give everything back."""
        self.truncate(seq, 0)
        del self._sequences[seq]

    def view(self, seq: int, length: int | None = None) -> KvView:
        """Where a sequence's first `length` tokens lie (all of them if not given)."""
        s = self._sequences[seq]
        length = s.length if length is None else length
        held = -(-length // BLOCK)
        if s.seen is None or len(s.seen.blocks) != held:
            blocks = tuple(s.blocks[:held])
            contiguous = not blocks or blocks == tuple(range(blocks[0], blocks[0] + held))
            s.seen = KvView(blocks, length, contiguous)
        return KvView(s.seen.blocks, length, s.seen.contiguous)

    def _table(self, shape: KvShape) -> KvTable:
        row_bytes = self.quant.row_bytes(shape.n_heads * shape.head_dim)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        # The array keeps the mapping alive, and gives it back when nobody needs the table any more.
        memory = mmap.mmap(-1, max(self.rows * row_bytes, mmap.PAGESIZE), flags=flags)
        raw = np.frombuffer(memory, np.uint8, self.rows * row_bytes).reshape(self.rows, row_bytes)
        return KvTable(raw, self.quant, shape.n_heads, shape.head_dim)

    def _check_room(self, s: _Sequence, growth: int, blocks: int) -> None:
        """Whether a sequence can have `growth` more blocks and the cache can give `blocks`."""
        if self._contiguous and growth > 0:
            if len(s.blocks) + growth > self.region:
                rows = self.region * BLOCK
                raise BudgetError(f"a sequence holds up to {rows} tokens here; ask for more with --ctx")
            full = not s.blocks and not len(self._free_regions())
        else:
            full = blocks > 0 and blocks > int(np.count_nonzero(self._references == 0))
        if full:
            raise BudgetError(
                f"the KV cache of {self.rows} tokens is full; ask for fewer sequences or a smaller --ctx"
            )

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

    def _tail_is_shared(self, s: _Sequence) -> bool:
        """Whether the next token would go into a block that another sequence reads."""
        return s.length % BLOCK != 0 and bool(self._references[s.blocks[-1]] > 1)

    def _unshare_tail(self, s: _Sequence) -> None:
        old = rows_of(s.blocks, s.length - s.length % BLOCK, s.length)
        self._references[s.blocks[-1]] -= 1
        s.blocks[-1] = self._take(None)
        s.seen = None
        self._copy(old, rows_of(s.blocks, s.length - s.length % BLOCK, s.length))

    def _copy(self, source: RowIndex, target: RowIndex) -> None:
        for pair in self.tables.values():
            for table in pair:
                table.raw[target] = table.raw[source]
