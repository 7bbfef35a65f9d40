"""The tables of the key-value cache: rows of one layer, and of the layers of one group together."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakMethod

import numpy as np
from numpy.typing import NDArray

from hetrun.graph.quant import QuantType
from hetrun.memory.kv.paged_allocator import RowIndex
from hetrun.memory.kv.virtual_memory import ZeroedMemory


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


class Tables:
    """The tables of one group of layers in the cache's memory: what groups do with their rows."""

    def __init__(self, memory: ZeroedMemory, tables: Sequence[KvTable], settle: Callable[[], None]) -> None:
        """`settle`: a method that is called before rows are read here, which may still be on their way."""
        self._memory, self._settled = (
            memory,
            WeakMethod(settle),
        )  # of the cache, which goes when it is not used
        self._tables = tables
        # Where each begins and the bytes of its rows: to ask numpy takes longer than what is done with them.
        self._places = [(t.address, t.row_bytes) for t in tables]
        self.row_bytes = sum(t.row_bytes for t in tables)

    def _settle(self) -> None:
        if settle := self._settled():
            settle()

    def move(self, source: int, target: int, n: int) -> None:
        """Copy n rows; they may overlap, which numpy would buffer."""
        self._settle()
        for address, size in self._places:
            ctypes.memmove(address + target * size, address + source * size, n * size)

    def show(self, at: int, rows: int, n: int, keep: int = 0) -> None:
        """See other memory from row `at` on, and in it the first `keep` rows as they were."""
        self._settle()
        for table, (address, size) in zip(self._tables, self._places, strict=True):
            kept = table.raw[at : at + keep].copy() if keep else None
            offset = address - self._memory.address
            self._memory.show(offset + at * size, offset + rows * size, n * size)
            if kept is not None:
                table.raw[at : at + keep] = kept

    def drop(self, rows: int, n: int) -> None:
        """Give the memory that these rows had at first back to the system."""
        for address, size in self._places:
            self._memory.drop(address - self._memory.address + rows * size, n * size)
