"""Keys and values in a GPU's memory: copies of rows of the host's cache.

The host's cache stays whole: rows that are written here go back to it, and rows that others wrote are brought
when they are first seen. So forks, cuts and saved prompts know nothing of GPUs, and a copy that has no room
any more is dropped without a word. Which copies are good is told by the stamps that the cache gives its rows.

Memory is taken by slabs: 32 rows that follow each other, of all layers of a set; of a layer that is shared
out, the heads that attend here. A table in GPU memory says for each 32 rows of the cache where their slab is;
kernels look there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetrun.backend import Ints, Pass
from hetrun.backends.cuda.driver import Address
from hetrun.backends.cuda.kernel_cache import Library, at, number
from hetrun.backends.cuda.memory import PACKED, Bytes, Memory
from hetrun.backends.cuda.programs import Source
from hetrun.errors import BudgetError
from hetrun.memory.kv.cache import KvCache, KvTable

ROWS = 32  # of a slab
THREADS = 128
ROWS_CU, SMALL_CU = Source("rows"), Source("small")


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


Part = tuple[int, int, int]  # a layer, its first KV head that is meant, and how many


class Slabs:
    """The rows of some layers of one group, or of some heads of them, as far as they are here."""

    def __init__(
        self, memory: Memory, library: Library, kv: KvCache, group: int, parts: Sequence[Part]
    ) -> None:
        self._memory, self._library = memory, library
        self._stamps, self._window = kv.groups[group].stamps, kv.groups[group].window
        self.group = group
        self.planes: dict[tuple[Part, int], Plane] = {}  # of each part: 0 keys, 1 values
        self.row_bytes = 0  # of all planes together
        for part in parts:
            for i, table in enumerate(kv.heads(*part)):
                plane = Plane(table, ROWS * self.row_bytes, self.row_bytes)
                self.planes[part, i] = plane
                self.row_bytes += plane.size
        blocks = -(-len(self._stamps) // ROWS)
        self._known = np.zeros(blocks * ROWS, np.int64)  # stamps of rows when they came; 0: not here
        self._slabs: OrderedDict[int, Address] = OrderedDict()  # by block; those used longest ago come first
        self._in_use: frozenset[int] = frozenset()
        self.table = memory.take(8 * blocks, "the table of keys and values")
        memory.driver.fill(self.table, 0, 8 * blocks, memory.computing)
        self._facts = memory.take(20 * len(self.planes), "what rows are like")
        memory.send(self._facts, self._described())
        self._packed = memory.packing()
        self._most = max(
            1, PACKED // (self.row_bytes + 8)
        )  # rows that cross in one piece, with their numbers
        self._landing = [memory.driver.pinned(ROWS * self.row_bytes) for _ in range(2)]
        self._landed = [memory.driver.event() for _ in range(2)]

    def _described(self) -> Bytes:
        """What kernels that move rows know of the planes: where in a slab, where in a packed row, sizes."""
        planes = self.planes.values()
        facts = (
            np.array([p.at for p in planes], np.int64),
            np.array([p.packed_at for p in planes], np.int64),
            np.array([p.size for p in planes], np.int32),
        )
        return np.concatenate([f.view(np.uint8) for f in facts])

    # --- before a pass

    def prepare(self, work: Pass) -> None:
        """Have slabs for all rows of a pass, and in them what it sees and others wrote."""
        views = [part.kv[self.group] for part in work.parts]
        self._in_use = frozenset(b for v in views for b in range(v.first // ROWS, -(-v.end // ROWS)))
        new = self._in_use.difference(self._slabs)
        for block in self._in_use - new:
            self._slabs.move_to_end(block)
        if new:
            self._add(sorted(new))
        missing = [
            self._missing(view.first, view.end - (part.b - part.a), new)
            for view, part in zip(views, work.parts, strict=True)
        ]
        for rows in missing:
            for a in range(0, len(rows), self._most):
                self._bring(rows[a : a + self._most])

    def written(self, slots: Ints) -> None:
        """A pass has written these rows, here and at home."""
        self._known[slots] = self._stamps[slots]

    def _missing(self, first: int, end: int, new: frozenset[int]) -> Ints:
        """Rows that are not here as they are now.

        If the last one is, those before it were here when it came, and none has changed since: whatever
        changes a row of a sequence changes those behind it. But a slab may have been dropped, and a window
        that was cut reaches further back than it did then.
        """
        here = end <= first or self._known[end - 1] == self._stamps[end - 1]
        if here and not self._window and new.isdisjoint(range(first // ROWS, -(-end // ROWS))):
            return np.empty(0, np.int64)
        return first + np.flatnonzero(self._known[first:end] != self._stamps[first:end])

    def _add(self, blocks: Sequence[int]) -> None:
        """Slabs for more blocks, or for none of them."""
        entries: dict[int, Address] = {}
        try:
            for block in blocks:
                entries[block] = self._memory.take(ROWS * self.row_bytes, "keys and values")
            self._enter(entries)
        except BudgetError:
            for address in entries.values():
                self._memory.give(address)
            raise
        self._slabs.update(entries)

    def drop_oldest(self) -> bool:
        """Give the memory of the slab up that was used longest ago; False where all are in use."""
        block = next((block for block in self._slabs if block not in self._in_use), None)
        if block is None:
            return False
        self._known[block * ROWS : (block + 1) * ROWS] = 0
        self._memory.give(self._slabs.pop(block))
        return True

    def _enter(self, entries: Mapping[int, Address]) -> None:
        """Write where slabs are into the table. Those of blocks that went stay: nobody looks there."""
        n = len(entries)
        numbers = np.array([*entries.keys(), *entries.values()], np.int64)
        target = self._memory.take(numbers.nbytes, "new entries of a table")
        self._memory.send(target, numbers.view(np.uint8))
        arguments = at(self.table), at(target), at(target + 8 * n), number(n)
        self._memory.run(
            self._library.launch(SMALL_CU, "set_entries", (-(-n // THREADS),), THREADS, *arguments)
        )
        self._memory.give(target)

    def _bring(self, rows: Ints) -> None:
        """Copy rows of the host's cache into their slabs."""
        slots = self._slots(rows)
        packed = [plane.table.raw[rows].reshape(-1) for plane in self.planes.values()]
        self._memory.send(self._packed, np.concatenate(packed))
        self._move("spread_rows", len(rows), slots)
        self._known[rows] = self._stamps[rows]

    def _slots(self, rows: Ints) -> Address:
        target = self._packed + self._most * self.row_bytes
        self._memory.send(target, np.ascontiguousarray(rows, np.int64).view(np.uint8))
        return target

    def _move(self, kernel: str, n: int, slots: Address) -> None:
        planes = len(self.planes)
        facts = at(self._facts), at(self._facts + 16 * planes), at(self._facts + 8 * planes)
        arguments = at(self.table), at(slots), *facts, at(self._packed)
        self._memory.run(self._library.launch(ROWS_CU, kernel, (n, planes), THREADS, *arguments))

    # --- behind a pass

    def send_home(self, slots: Ints) -> Homecoming:
        """Rows that a pass wrote, on their way to the host's cache."""
        return Homecoming(self, slots)

    def pack(self, rows: Ints, turn: int) -> None:
        """Rows as one piece, on its way to one of two landing places."""
        self._move("pack_rows", len(rows), self._slots(rows))
        driver, nbytes = self._memory.driver, len(rows) * self.row_bytes
        if nbytes > len(self._landing[turn]):  # what landed there before was put away
            self._landing[turn] = driver.pinned(nbytes)
        landing = self._landing[turn]
        driver.copy(int(landing.ctypes.data), self._packed, nbytes, self._memory.computing)
        driver.record(self._landed[turn], self._memory.computing)

    def unload(self, rows: Ints, turn: int) -> None:
        """What landed, in the host's cache."""
        self._memory.driver.synchronize(self._landed[turn])
        n, landing = len(rows), self._landing[turn]
        for plane in self.planes.values():
            begin = n * plane.packed_at
            plane.table.raw[rows] = landing[begin : begin + n * plane.size].reshape(n, plane.size)

    def close(self) -> None:
        """Give everything back; the cache is gone."""
        for address in (*self._slabs.values(), self.table, self._facts):
            self._memory.give(address)
        self._slabs.clear()

    @property
    def most(self) -> int:
        """Rows that cross in one piece."""
        return self._most


class Homecoming:
    """Rows on their way home: in pieces, of which one lands while the one before is put away."""

    def __init__(self, slabs: Slabs, slots: Ints) -> None:
        self._slabs, self._slots = slabs, slots
        self._pieces = [slots[a : a + slabs.most] for a in range(0, len(slots), slabs.most)]
        for turn, piece in enumerate(self._pieces[:2]):
            slabs.pack(piece, turn)

    def finish(self) -> None:
        """Until all of them are there."""
        for i, piece in enumerate(self._pieces):
            self._slabs.unload(piece, i % 2)
            if i + 2 < len(self._pieces):
                self._slabs.pack(self._pieces[i + 2], i % 2)
        self._slabs.written(self._slots)
