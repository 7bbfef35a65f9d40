"""Keys and values in a GPU's memory: copies of rows of the host's cache.

Rows that are written here go back to the host's cache: with the results of a pass where they are few, else
piece by piece while the next pass is computed. Rows that others wrote are brought when they are first seen.
So forks, cuts and saved prompts know nothing of GPUs, and a copy that has no room any more is dropped without
a word. The stamps that the cache gives its rows say which copies are good.

Memory is taken by slabs: 32 rows that follow each other, of all layers of a set; of a layer that is shared
out, the heads that attend here. A table in GPU memory says for each 32 rows of the cache where their slab is;
kernels look there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hetrun.backend import Ints, Pass, SequencePart
from hetrun.backends.cuda.crossing.shelf import ENOUGH, Plane, SlabShelf, put_away
from hetrun.backends.cuda.driver import Address, Driver, Event, Launch, MemoryCopy
from hetrun.backends.cuda.kernel_cache import KernelLibrary, at, long, number
from hetrun.backends.cuda.memory import PACKED, Bytes, CudaMemory
from hetrun.backends.cuda.programs import Source
from hetrun.errors import BudgetError
from hetrun.memory.kv.arrivals import Arrivals
from hetrun.memory.kv.cache import KvCache

ROWS = 32  # of a slab
# What comes home at once, and on how many of these there may be: a pass waits for one of them at most, which
# is put away while the device has done its work.
PIECE, MOST_LANDINGS = 1 << 20, 16
THREADS = 128
ROWS_CU, SMALL_CU = Source("rows"), Source("small")


Saw = tuple[int, int, int]  # of a sequence its first row, its first block, and the one behind its last
Part = tuple[int, int, int]  # a layer, its first KV head that is meant, and how many
Parts = Mapping[int, tuple[Part, ...]]  # by group


class Slabs:
    """The rows of some layers of one group, or of some heads of them, as far as they are here."""

    def __init__(
        self, memory: CudaMemory, library: KernelLibrary, kv: KvCache, group: int, parts: Sequence[Part]
    ) -> None:
        self._memory, self._library = memory, library
        self._kv = weakref.ref(kv)  # with which this goes, too
        self.layers = frozenset(layer for layer, _, _ in parts)
        self._stamps, self._window = kv.groups[group].stamps, kv.groups[group].window
        self.group = group
        self.planes: dict[tuple[Part, int], Plane] = {}  # of each part: 0 keys, 1 values
        self.row_bytes = 0  # of all planes together
        for part in parts:
            for i, table in zip(range(len(kv.kept[part[0]])), kv.heads(*part), strict=False):
                plane = Plane(table, ROWS * self.row_bytes, self.row_bytes)
                self.planes[part, i] = plane
                self.row_bytes += plane.size
        blocks = -(-len(self._stamps) // ROWS)
        self._known = np.zeros(blocks * ROWS, np.int64)  # stamps of rows when they came; 0: not here
        self._slabs: dict[int, Address] = {}  # by block
        # By block, as a pass may see thousands: whether it has a slab, and which pass used it last.
        self._there = np.zeros(blocks, np.bool_)
        self._used = np.zeros(blocks, np.int64)
        self.last_used = self._use = 0  # by the last pass; by the last one that looked at its blocks
        self._seen: list[Saw] = []  # by that one, if nothing has been dropped since
        self._is_in_use = False  # by a pass that is not over
        self.table = memory.take(8 * blocks, "the table of keys and values")
        memory.driver.fill(self.table, 0, 8 * blocks, memory.computing)
        self._facts = memory.take(20 * len(self.planes), "what rows are like")
        memory.send(self._facts, self._described())
        self._packed = memory.packing()
        self._most = max(
            1, PACKED // (self.row_bytes + 8)
        )  # rows that cross in one piece, with their numbers
        self._landings: list[KvLanding] = []  # that are free
        self._more = MOST_LANDINGS  # that there may be besides
        self._shelf: SlabShelf | None = None

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

    def prepare(self, work: Pass, written_here: bool = True) -> None:
        """Have slabs for all rows of a pass, and in them what it sees and others wrote: its own rows, too, if
        they were not `written_here`."""
        self.last_used, self._is_in_use = self._memory.next_use(), True
        if self._goes_on(work.parts, written_here):
            return
        sees = [
            (view.first, view.end, view.end - (part.b - part.a) * written_here)
            for part in work.parts
            for view in (part.kv[self.group],)
        ]
        self._seen, self._use = [], self.last_used
        seen = [slice(first // ROWS, -(-end // ROWS)) for first, end, _ in sees]
        for blocks in seen:
            self._used[blocks] = self._use
        new = np.empty(0, np.int64)
        if not all(self._there[blocks].all() for blocks in seen):
            new = np.flatnonzero((self._used == self._use) & ~self._there)
            self._add(new.tolist())
        missing = [self._missing(first, own, new) for first, _, own in sees]
        for rows in missing:
            for a in range(0, len(rows), self._most):
                self._bring(rows[a : a + self._most])
        self._seen = [
            (first, blocks.start, blocks.stop) for (first, _, _), blocks in zip(sees, seen, strict=True)
        ]

    def _goes_on(self, parts: Sequence[SequencePart], written_here: bool) -> bool:
        """Whether a pass sees what the last one that looked closely had brought, and rows that were written
        here since: that is most of an answer's passes. Those slabs are still there, and a row that is here as
        it is now says the same of those before it, which that pass saw as well."""
        if len(parts) != len(self._seen):
            return False
        for part, (from_, begin, behind) in zip(parts, self._seen, strict=True):
            view = part.kv[self.group]
            first, end = view.first, view.first + view.length
            if first < from_ or first // ROWS != begin or -(-end // ROWS) != behind:
                return False
            own = end - (part.b - part.a) * written_here
            if own > first and self._known[own - 1] != self._stamps[own - 1]:
                return False
        return True

    def leave_off(self) -> None:
        """The pass is over, or did not begin: what it saw may be dropped for others."""
        self._is_in_use = False

    def written(self, slots: Ints, stamps: Ints) -> None:
        """A pass has written these rows, with these stamps."""
        self._known[slots] = stamps

    def _missing(self, first: int, end: int, new: Ints) -> Ints:
        """Rows that are not here as they are now.

        If the last one is, those before it were here when it came, and none has changed since: whatever
        changes a row of a sequence changes those behind it. But a slab may have been dropped, and a window
        that was cut reaches further back than it did then.
        """
        here = end <= first or self._known[end - 1] == self._stamps[end - 1]
        in_new = (new >= first // ROWS) & (new < -(-end // ROWS))
        if here and not self._window and not in_new.any():
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
        self._there[list(entries)] = True

    def drop_oldest(self) -> bool:
        """Give the memory of the slab up that was used longest ago; False where all are in use."""
        free = self._used < self._use if self._is_in_use else self._used >= 0
        there = np.flatnonzero(self._there & free)
        if not there.size:
            return False
        block = int(there[self._used[there].argmin()])
        self._settle()
        self._seen = []
        self._known[block * ROWS : (block + 1) * ROWS] = 0
        self._there[block] = False
        self._memory.give(self._slabs.pop(block))
        return True

    def _enter(self, entries: Mapping[int, Address]) -> None:
        """Write where slabs are into the table. Those of blocks that went stay: they are not read."""
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
        self._settle()
        slots = self._slots(rows)
        packed = [plane.table.raw[rows] for plane in self.planes.values()]
        self._memory.send(self._packed, np.concatenate(packed, axis=1).reshape(-1))
        self._memory.run(self._mover("spread_rows", len(rows), slots))
        self._known[rows] = self._stamps[rows]

    def _slots(self, rows: Ints) -> Address:
        target = self._packed + self._most * self.row_bytes
        self._memory.send(target, np.ascontiguousarray(rows, np.int64).view(np.uint8))
        return target

    def _mover(self, kernel: str, n: int, slots: Address) -> Launch:
        planes = len(self.planes)
        facts = at(self._facts), at(self._facts + 16 * planes), at(self._facts + 8 * planes)
        arguments = at(self.table), at(slots), *facts, at(self._packed), long(self.row_bytes)
        return self._library.launch(ROWS_CU, kernel, (n, planes), THREADS, *arguments)

    # --- after a pass

    @property
    def few(self) -> int:
        """Rows of a pass up to which they come home with its results."""
        return min(ENOUGH, self.piece)

    def packs(self, n: int, slots: Address, target: int) -> tuple[Launch, MemoryCopy | Launch]:
        """What brings so few rows home, to page-locked memory."""
        pack = self._mover("pack_rows", n, slots)
        return pack, self._memory.outward(target, self._packed, n * self.row_bytes)

    def keep(self, slots: Ints, stamps: Ints, packed: Bytes) -> None:
        """Rows that have come so; their memory may change."""
        kv = self._kv()
        assert kv is not None
        self.written(slots, stamps)
        if self._shelf is None:
            planes = list(self.planes.values())
            self._shelf = SlabShelf(self.layers, self.group, planes, self._stamps, self.few)
        self._shelf.add(slots, stamps, packed)
        kv.arrivals.keep(self._shelf)

    def stamps(self, slots: Ints) -> Ints:
        """What rows are now."""
        return self._stamps[slots]

    def send_home(self, slots: Ints) -> RowsReturn:
        """Rows that a pass wrote, on their way to the host's cache."""
        kv = self._kv()
        assert kv is not None
        return RowsReturn(self, kv.arrivals, slots, self._stamps[slots])

    def land(self, rows: Ints) -> KvLanding | None:
        """Rows as one piece, on its way to a landing place; None where none is free."""
        if not self._landings and self._more:
            self._more -= 1
            self._landings.append(KvLanding.made(self._memory, self.piece * self.row_bytes))
        if not self._landings:
            return None
        found, driver, nbytes = self._landings.pop(), self._memory.driver, len(rows) * self.row_bytes
        self._memory.run(self._mover("pack_rows", len(rows), self._slots(rows)))
        self._memory.collect(int(found.memory.ctypes.data), self._packed, nbytes)
        driver.record(found.landed, self._memory.computing)
        return found

    def unload(self, piece: KvPiece) -> None:
        """What landed, in the host's cache, as far as rows are what they were. The place is free then."""
        rows, landing, n = piece.rows, piece.landing, len(piece.rows)
        assert landing is not None
        if not piece.is_there:
            landing.driver.synchronize(landing.landed)
        good = self._stamps[rows] == piece.stamps
        packed = landing.memory[: n * self.row_bytes].reshape(n, self.row_bytes)
        put_away(list(self.planes.values()), *((rows, packed) if good.all() else (rows[good], packed[good])))
        self._landings.append(landing)

    def close(self) -> None:
        """Give everything back; the cache is gone."""
        for address in (*self._slabs.values(), self.table, self._facts):
            self._memory.give(address)
        self._slabs.clear()

    def leave(self) -> None:
        """The device goes: everything comes home that can."""
        with suppress(Exception):  # it may have failed; then the cache knows what it has lost
            self._settle()

    def _settle(self) -> None:
        if kv := self._kv():
            kv.settle()

    @property
    def piece(self) -> int:
        """Rows that come home at once."""
        return min(self._most, max(1, PIECE // self.row_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class KvLanding:
    """Page-locked memory where a piece arrives, and when it has."""

    memory: Bytes
    landed: Event
    driver: Driver

    @classmethod
    def made(cls, memory: CudaMemory, nbytes: int) -> KvLanding:
        """A new one."""
        return cls(memory.driver.pinned(nbytes), memory.driver.event(), memory.driver)

    @property
    def has_landed(self) -> bool:
        """Whether it is there."""
        return self.driver.happened(self.landed)


@dataclass(slots=True, eq=False)
class KvPiece:
    """Rows that come home at once, and where they land once they are on their way."""

    rows: Ints
    stamps: Ints  # -1: not wanted any more
    landing: KvLanding | None = None
    is_there: bool = False  # in its landing place: it comes home also if the device fails now


class RowsReturn:
    """Rows on their way home: as many pieces at once as there are places to land."""

    def __init__(self, slabs: Slabs, arrivals: Arrivals, slots: Ints, stamps: Ints) -> None:
        self._slabs, self._arrivals, self._slots, self._stamps = slabs, arrivals, slots, stamps
        step = slabs.piece
        self._pieces = deque(
            KvPiece(slots[a : a + step], stamps[a : a + step]) for a in range(0, len(slots), step)
        )
        if arrivals.send():  # those that were written before come first
            self.send()

    @property
    def layers(self) -> frozenset[int]:
        """Whose rows they are."""
        return self._slabs.layers

    @property
    def group(self) -> int:
        """Of layers that see equally far."""
        return self._slabs.group

    def finish(self) -> None:
        """The pass is over: the rows are good here, and the host's cache gets them by and by."""
        self._slabs.written(self._slots, self._stamps)
        for piece in self._pieces:
            piece.is_there = piece.landing is not None  # sent before the pass was over
        if self._pieces:
            self._arrivals.expect(self)

    def send(self) -> bool:
        """As many pieces as there are places to land; False where one has none."""
        for piece in self._pieces:
            if piece.landing is None:
                piece.landing = self._slabs.land(piece.rows)
                if piece.landing is None:
                    return False
        return True

    def advance(self, wait: bool) -> bool:
        """Put one piece away, if it is there or it is to `wait`."""
        piece = self._pieces[0]
        if wait and piece.landing is None:
            self.send()
        if piece.landing is None or not (wait or piece.is_there or piece.landing.has_landed):
            assert not wait, "only the oldest rows that come home have places to land"
            return False
        self._slabs.unload(piece)
        self._pieces.popleft()
        return True

    @property
    def over(self) -> bool:
        """Whether all of them are at home."""
        return not self._pieces

    def left(self) -> Ints:
        """Rows that are not at home."""
        return np.concatenate([piece.rows for piece in self._pieces])

    def forget(self, first: int, end: int) -> None:
        """These rows are not wanted any more."""
        for piece in self._pieces:
            piece.stamps[(piece.rows >= first) & (piece.rows < end)] = -1
