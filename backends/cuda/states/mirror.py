"""States in a GPU's memory: copies of slots of the host's cache.

What a pass writes stays here, lent by its slot: to bring it home each time would take longer than all else
that a token takes (50 MiB for a model of 4B). It comes home when others read it, or its place is wanted; what
others wrote is brought when it is first read. So forks, cuts and drafts know nothing of GPUs, and who
looks into a slot (`States.settle`) has what is known there.

A slot is used for another state once no sequence has it, and between two passes of a step it has what is
known so far. So a copy is good for what it was made for: the stamp that its slot had then, and how many
tokens it knows. A pass writes to a place that it does not read, as kernels do both at the same time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hetrun.backend import FLOAT_BYTES, Floats, Ints, Pass
from hetrun.backends.cuda.arena import in_arena
from hetrun.backends.cuda.driver import Address, Event
from hetrun.backends.cuda.memory import Bytes, CudaMemory
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.kv.states import NONE

PIECE = 4 << 20  # bytes that cross at once

Kept = tuple[int, str]  # a layer, and the kind of its op
Knowledge = tuple[int, int]  # the stamp of a slot, and the tokens that the state in it knows


@dataclass(slots=True)
class StateCopy:
    """A place, and what is known there; None: nothing yet."""

    address: Address
    known: Knowledge | None = None


@dataclass(frozen=True, slots=True)
class StateStretch:
    """Some numbers of what a layer keeps, a row for each slot: where they begin in a place."""

    table: Floats
    at: int

    @property
    def nbytes(self) -> int:
        """Of a slot."""
        return FLOAT_BYTES * int(self.table.shape[1])


@dataclass(frozen=True, slots=True)
class StateLanding:
    """Page-locked memory where pieces of a state arrive."""

    memory: Bytes
    arrived: Event


@dataclass(frozen=True, slots=True)
class WrittenStates:
    """What a pass writes: slots, their places, and what is known there then."""

    mirror: StateMirror
    copies: Mapping[int, tuple[StateCopy, Knowledge]]

    def finish(self) -> None:
        """The pass is over."""
        self.mirror.keep(self.copies)


@dataclass(frozen=True, slots=True)
class StateAddresses:
    """Where a pass finds and leaves states: of each sequence, and after each token; 0: nowhere."""

    read: Ints
    write: Ints
    written: WrittenStates


@dataclass(frozen=True, slots=True)
class StateAccess:
    """Which states a pass reads, of each sequence, and writes, after which token; NONE: none."""

    reads: Sequence[tuple[int, Knowledge]]
    writes: Sequence[tuple[int, int, Knowledge]]
    read_slots: frozenset[int]
    slots: frozenset[int]  # all of them


class StateMirror:
    """What some layers keep in states, as far as it is here."""

    def __init__(self, memory: CudaMemory, kv: KvCache, kept: Sequence[Kept]) -> None:
        assert kv.states is not None
        self._memory, self._states = memory, kv.states
        self.at: dict[Kept, int] = {}  # where each layer's part begins in a place
        stretches, size = list[StateStretch](), 0
        for layer, kind in kept:
            table, self.at[layer, kind] = kv.state(layer, kind), size
            stretches += _cut(table, size)
            size += in_arena(FLOAT_BYTES * table.shape[1])
        self._layers = frozenset(layer for layer, _ in kept)
        self.brought = 0  # states that came from the host
        self._size, self._pieces = size, _grouped(stretches)
        self._copies: OrderedDict[int, StateCopy] = (
            OrderedDict()
        )  # by slot; those used longest ago come first
        self._in_use: frozenset[int] = frozenset()  # by the last pass
        self._writing: set[int] = set()  # slots of passes that are not over yet
        self._left: list[Address] = []  # places that the last pass may still read
        self._spare: list[Address] = []  # those of the pass before it
        self._landings: list[StateLanding] = []  # two, once something has come home

    # --- before a pass

    def prepare(self, work: Pass) -> StateAddresses:
        """Have places for all slots of a pass, and in them what it reads and others wrote."""
        asked: StateAccess | None = work.worked_out.get(key := (StateAccess, self._states))
        if asked is None:
            asked = work.worked_out[key] = self._asked(work)
        self._spare += self._left
        self._left = []
        self._in_use = asked.slots
        read, write = np.zeros(len(asked.reads), np.int64), np.zeros(len(work.tokens), np.int64)
        for i, (slot, knowledge) in enumerate(asked.reads):
            if slot != NONE:
                read[i] = self._read(slot, knowledge)
        made: dict[int, tuple[StateCopy, Knowledge]] = {}
        for token, slot, knowledge in asked.writes:
            if slot not in made and slot in asked.read_slots and slot in self._copies:
                self._left.append(self._copies.pop(slot).address)
            copy = self._place(slot)
            made[slot], copy.known, write[token] = (copy, knowledge), None, copy.address
        self._writing |= made.keys()
        self._give_back(self._spare)
        return StateAddresses(read, write, WrittenStates(self, made))

    def _asked(self, work: Pass) -> StateAccess:
        """What a pass wants of each of its mirrors."""
        reads, writes = list[tuple[int, Knowledge]](), list[tuple[int, int, Knowledge]]()
        for part in work.parts:
            assert part.states is not None
            known = int(work.positions[part.a]) if part.b > part.a else 0
            reads.append((part.states.read, (self._stamp(part.states.read), known)))
            for token in np.flatnonzero(part.states.write != NONE).tolist():
                slot = int(part.states.write[token])
                known = int(work.positions[part.a + token]) + 1
                writes.append((part.a + token, slot, (self._stamp(slot), known)))
        read_slots = frozenset(slot for slot, _ in reads if slot != NONE)
        return StateAccess(reads, writes, read_slots, read_slots | {slot for _, slot, _ in writes})

    def _stamp(self, slot: int) -> int:
        return int(self._states.stamps[slot])

    def _read(self, slot: int, knowledge: Knowledge) -> Address:
        """The place of a state, which is brought if it is not there."""
        copy = self._place(slot)
        if copy.known != knowledge:
            self._states.settle(slot, knowledge[1], self._layers)
            for piece in self._pieces:
                for stretch in piece:
                    numbers = stretch.table[slot].view(np.uint8)
                    self._memory.send(copy.address + stretch.at, numbers)
            copy.known = knowledge
            self.brought += 1
        return copy.address

    def _place(self, slot: int) -> StateCopy:
        """A place for a slot: its own, or one of a slot that has become another's, or a new one."""
        if slot not in self._copies:
            old = next((s for s in self._copies if self._is_stale(s)), None)
            if old is not None:
                self._copies[slot] = StateCopy(self._copies.pop(old).address)
            elif self._spare:
                self._copies[slot] = StateCopy(self._spare.pop())
            else:
                self._copies[slot] = StateCopy(self._memory.take(self._size, "states"))
        self._copies.move_to_end(slot)
        return self._copies[slot]

    def _is_stale(self, slot: int) -> bool:
        if slot in self._in_use or slot in self._writing:
            return False
        known = self._copies[slot].known
        return known is None or known[0] != self._stamp(slot)

    def drop_oldest(self) -> bool:
        """Give the memory of the copy up that was used longest ago, once it is home; False where all are in
        use."""
        found = next((s for s in self._copies if s not in self._in_use and s not in self._writing), None)
        if found is None:
            return False
        self._return(found)
        self._memory.give(self._copies.pop(found).address)
        return True

    def _return(self, slot: int) -> None:
        """Have home what is nowhere else."""
        known = self._copies[slot].known
        if known and self._states.is_lent(slot, self.home):
            self._states.settle(slot, known[1], self._layers)

    def _give_back(self, places: list[Address]) -> None:
        """What no pass reads any more."""
        while places:
            self._memory.give(places.pop())

    # --- after a pass

    def keep(self, copies: Mapping[int, tuple[StateCopy, Knowledge]]) -> None:
        """A pass is over: what it wrote is known here, and nowhere else."""
        for slot, (copy, knowledge) in copies.items():
            copy.known = knowledge
            self._writing.discard(slot)
            self._states.lend(slot, knowledge[1], self.home, self._layers)

    def home(self, slot: int) -> None:
        """What is known here, into the host's slot: one piece lands while the one before is put away."""
        copy, pieces = self._copies[slot], self._pieces
        if copy.known is None:  # a pass goes on from there, and has what it was
            return
        driver = self._memory.driver
        while len(self._landings) < 2:
            self._landings.append(StateLanding(driver.pinned(PIECE), driver.event()))
        self._land(copy.address, pieces[0], self._landings[0])
        for i, piece in enumerate(pieces):
            if i + 1 < len(pieces):
                self._land(copy.address, pieces[i + 1], self._landings[(i + 1) % 2])
            landing = self._landings[i % 2]
            driver.synchronize(landing.arrived)
            for stretch in piece:
                numbers = landing.memory[stretch.at - piece[0].at :][: stretch.nbytes]
                stretch.table[slot] = numbers.view(np.float32)

    def _land(self, place: Address, piece: Sequence[StateStretch], landing: StateLanding) -> None:
        """A piece, on its way."""
        driver, stream = self._memory.driver, self._memory.computing
        begin, end = piece[0].at, piece[-1].at + piece[-1].nbytes
        self._memory.collect(int(landing.memory.ctypes.data), place + begin, end - begin)
        driver.record(landing.arrived, stream)

    # --- ends

    def leave(self) -> None:
        """The device goes: everything comes home that can."""
        for slot in self._copies:
            with suppress(Exception):  # it may have failed; then the states are lost
                self._return(slot)

    def close(self) -> None:
        """Give everything back; the cache is gone."""
        self._give_back(self._left)
        self._give_back(self._spare)
        for copy in self._copies.values():
            self._memory.give(copy.address)
        self._copies.clear()


def _cut(table: Floats, at: int) -> Iterator[StateStretch]:
    """What a layer keeps, in stretches that fit into a piece."""
    step = PIECE // FLOAT_BYTES
    for a in range(0, table.shape[1], step):
        yield StateStretch(table[:, a : a + step], at + FLOAT_BYTES * a)


def _grouped(stretches: Sequence[StateStretch]) -> list[list[StateStretch]]:
    """Stretches that follow each other in pieces that are as large as may be."""
    pieces: list[list[StateStretch]] = []
    for stretch in stretches:
        if pieces and stretch.at + stretch.nbytes - pieces[-1][0].at <= PIECE:
            pieces[-1].append(stretch)
        else:
            pieces.append([stretch])
    return pieces
