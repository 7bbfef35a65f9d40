"""States: what layers keep of a sequence that does not grow with it, such as a delta net's matrices.

A state is what all such layers know after some tokens, and lies in one slot. It cannot be rolled back, so a
sequence has several: the last one, the one that its last step began with, and checkpoints. A step reads one
slot and writes others; a slot that a sequence has is never written again. So a fork shares slots instead of
copying them, and a step that failed leaves the state that it began with.

A device with memory of its own may keep what it wrote there (`lend`). It comes home when others read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import BackendError, BudgetError
from hetrun.graph import StateShape
from hetrun.memory.kv.virtual_memory import ZeroedMemory, whole_pages
from hetrun.system.units import format_bytes

NONE = -1  # the slot of an empty sequence: its states are zeros
MOST_CHECKPOINTS = 8  # of a sequence; then those go that are nearest to their neighbours
MOST_SHARED = 64  # slots besides two for each sequence
LINE = 16  # floats of a cache line
LEAST_DISTANCE = 512  # tokens from one checkpoint to the next: to compute fewer again takes hardly longer

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bring = Callable[[int], None]  # what a device has of a slot comes home


@dataclass(frozen=True, slots=True)
class LentState:
    """What a device has of a slot: what some layers, or all, know after `position` tokens."""

    position: int
    layers: frozenset[int] | None

    def touches(self, layers: frozenset[int] | None) -> bool:
        """Whether some of these layers are among them."""
        return layers is None or self.layers is None or not self.layers.isdisjoint(layers)


@dataclass(frozen=True, slots=True)
class StateView:
    """The slots of one sequence in a pass: where its state is read, and after which of its tokens it is
    written where (`NONE`: not after that one)."""

    read: int
    write: Ints


class StateMark(NamedTuple):
    """A number of tokens after which a sequence's state is to be kept."""

    position: int
    checkpoint: bool = True  # False: only until the sequence goes on


@dataclass(slots=True)
class _KeptState:
    """What is known after a number of tokens."""

    position: int
    slot: int
    checkpoint: bool = False  # stays when the sequence goes on


@dataclass(slots=True)
class _SequenceStates:
    """What one sequence has, in the order of its tokens; the last is where it stands."""

    states: list[_KeptState] = field(default_factory=list)
    began: int = 0  # where its last step began: what comes from there on may not be written yet


def state_bytes(shapes: Mapping[int, StateShape]) -> int:
    """Memory of one slot."""
    return whole_pages(4 * sum(_aligned(n) for shape in shapes.values() for n in shape.floats.values()))


def _aligned(n: int) -> int:
    """Floats of whole cache lines."""
    return -(-n // LINE) * LINE


class States:
    """Slots, and which of them each sequence has."""

    def __init__(self, shapes: Mapping[int, StateShape], sequences: int) -> None:
        """Address space for the states of that many sequences, or for fewer where the system has less."""
        self.bytes = state_bytes(shapes)
        self._memory, self.slots = _reserved(self.bytes, 2 * sequences + MOST_SHARED)
        flat = self._memory.bytes[: self.slots * self.bytes].view(np.float32).reshape(self.slots, -1)
        self._tables: dict[tuple[int, str], Floats] = {}
        at = 0
        for layer, shape in sorted(shapes.items()):
            for kind, n in shape.floats.items():
                self._tables[layer, kind] = flat[:, at : at + n]
                at += _aligned(n)
        self._flat = flat[:, :at]
        self._sharers = np.zeros(self.slots, np.int64)
        self._touched = np.zeros(self.slots, np.bool_)
        # A slot's stamp changes when it is given to another state: by it a device knows whether it has a copy
        # of what is there now.
        self.stamps = np.zeros(self.slots, np.int64)
        self._stamp = 0
        # By slot the devices that have what is known there, or a part of it, and after how many tokens.
        self._away: dict[int, dict[Bring, LentState]] = {}
        self._free = list(range(self.slots))[::-1]
        self._held: dict[int, _SequenceStates] = {}
        self.layout = " ".join(f"{layer}:{dict(shape.floats)}" for layer, shape in sorted(shapes.items()))

    @property
    def size(self) -> int:
        """Bytes that `export` gives of a state."""
        return int(self._flat.shape[1]) * 4

    @property
    def used_bytes(self) -> int:
        """Memory of the slots that sequences have; shared ones count once."""
        return (self.slots - len(self._free)) * self.bytes

    @property
    def touched_bytes(self) -> int:
        """The same, and what sequences had before them and the system was not given back."""
        return int(self._touched.sum()) * self.bytes

    @property
    def held_bytes(self) -> int:
        """Memory that the system has given."""
        held = self._memory.held_bytes
        return self.touched_bytes if held is None else held

    @property
    def tables(self) -> list[Floats]:
        """What all layers keep."""
        return list(self._tables.values())

    def table(self, layer: int, kind: str) -> Floats:
        """What a layer keeps under a name, a row for each slot."""
        return self._tables[layer, kind]

    def lend(self, slot: int, position: int, bring: Bring, layers: frozenset[int] | None = None) -> None:
        """A device has what some layers know after `position` tokens, the slot has not; None: all layers."""
        self._away.setdefault(slot, {})[bring] = LentState(position, layers)

    @property
    def any_lent(self) -> bool:
        """Whether a device has anything that a slot has not."""
        return bool(self._away)

    def is_lent(self, slot: int, bring: Bring) -> bool:
        """Whether a device has what its slot has not."""
        return bring in self._away.get(slot, ())

    def settle(self, slot: int, position: int, layers: frozenset[int] | None = None) -> None:
        """Have in a slot what is known after `position` tokens, wherever it is: of some layers, or of all.

        A state that a device cannot give any more is lost: no sequence has it then.
        """
        away = self._away.pop(slot, None)
        if not away:
            return
        wanted = [b for b, lent in away.items() if lent.position == position and lent.touches(layers)]
        # Other layers may have gone on in the same slot already: what these have made is not asked for yet.
        if stays := {b: lent for b, lent in away.items() if lent.position >= position and b not in wanted}:
            self._away[slot] = stays
        for bring in wanted:
            try:
                bring(slot)
            except BaseException:
                self._lose(slot)
                raise

    def overwrite(self, slot: int) -> None:
        """Something else is about to be written there: what devices have of it is of no use."""
        self._away.pop(slot, None)

    def _lose(self, slot: int) -> None:
        for held in self._held.values():
            for s in [s for s in held.states if s.slot == slot]:
                held.states.remove(s)
                self._release(slot)

    def alloc(self, seq: int) -> None:
        """A new, empty sequence."""
        self._held[seq] = _SequenceStates()

    def wants(self, seq: int) -> int:
        """By how many the used slots grow when a sequence goes on."""
        return 1 - sum(1 for s in self._going(seq) if self._sharers[s.slot] == 1)

    def _going(self, seq: int) -> list[_KeptState]:
        """What stays only until a sequence goes on."""
        return [s for s in self._held[seq].states[:-1] if not s.checkpoint]

    def has_room(self, wanted: int) -> bool:
        """Whether there are enough slots, if checkpoints are given up for them."""
        return wanted <= len(self._free) + sum(len(self._droppable(held)) for held in self._held.values())

    def extend(self, seq: int, length: int, n: int) -> None:
        """A slot for the state after n more tokens; what only the last step could be taken back to goes.

        BudgetError without a slot; nothing has changed then.
        """
        if not n:
            return
        held = self._held[seq]
        self._make_room(self.wants(seq))
        for s in self._going(seq):
            held.states.remove(s)
            self._release(s.slot)
        held.began = length
        held.states.append(_KeptState(length + n, self._take()))

    def mark(self, seq: int, marks: Sequence[StateMark], spare: int) -> None:
        """Where the state is to be kept on the way of the last step, which has not run yet: as far as there
        are `spare` slots. At its end it is there anyway."""
        held = self._held[seq]
        *before, last = held.states
        kept = {m.position: m.checkpoint for m in sorted(marks)}  # of two at one place the checkpoint
        for position, checkpoint in sorted(kept.items()):
            if spare > 0 and self._free and held.began < position < last.position:
                before.append(_KeptState(position, self._take(), checkpoint))
                spare -= 1
        last.checkpoint = kept.get(last.position, False)
        held.states = [*before, last]
        while len(self._droppable(held)) + sum(
            s.checkpoint for s in held.states if s.position >= held.began
        ) > (MOST_CHECKPOINTS) and self._drop_one(held):
            pass

    def view(self, seq: int, a: int, b: int) -> StateView:
        """The slots for the tokens at positions a to b of a sequence, in one pass of the last step."""
        held = self._held[seq]
        states, at = held.states, {s.position: s.slot for s in held.states}
        # Between two passes of a step the state lies in its last slot.
        between = bool(states) and held.began < a < states[-1].position
        if a and not between and a not in at:
            raise BackendError("the state of a sequence was lost when its device failed")
        read = (at.get(a, states[-1].slot) if between else at[a]) if a else NONE
        write = np.array([at.get(p, NONE) for p in range(a + 1, b + 1)], np.int64)
        if b > a and write[-1] == NONE:
            write[-1] = states[-1].slot
        return StateView(read, write)

    def reach(self, seq: int, n: int) -> int:
        """The last position up to n whose state is there."""
        return max((s.position for s in self._held[seq].states if s.position <= n), default=0)

    def keepable(self, seq: int, n: int) -> bool:
        """Whether the state after n tokens is there."""
        return self.reach(seq, n) == n

    def truncate(self, seq: int, n: int) -> None:
        """Go back to a state that is there."""
        held = self._held[seq]
        for s in [s for s in held.states if s.position > n]:
            held.states.remove(s)
            self._release(s.slot)

    def fork(self, seq: int, new: int, n: int) -> None:
        """Give a new, empty sequence the state after the first n tokens of another, and its checkpoints."""
        for s in self._held[seq].states:
            if s.position == n or (s.checkpoint and s.position < n):
                self._sharers[s.slot] += 1
                self._held[new].states.append(_KeptState(s.position, s.slot, s.checkpoint))

    def place(self, seq: int, n: int) -> None:
        """A slot for a new, empty sequence that begins after n tokens."""
        if n:
            self._held[seq].states.append(_KeptState(n, self._take()))

    def export(self, seq: int, n: int) -> Iterator[memoryview]:
        """The memory of the state after n tokens, which must be there."""
        for s in self._held[seq].states:
            if s.position == n:
                self.settle(s.slot, n)
                yield self._flat[s.slot].data.cast("B")

    def free(self, seq: int) -> None:
        """Give everything back."""
        for s in self._held.pop(seq).states:
            self._release(s.slot)

    def thin(self, over: Collection[int] = ()) -> bool:
        """Give up a checkpoint of the sequence that has most; False if there is none. The last step of some
        is `over`: they are not taken back to where it began any more."""

        def droppable(seq: int) -> int:
            return len(self._droppable(self._held[seq], seq in over))

        seq = max(self._held, key=droppable, default=None)
        return seq is not None and self._drop_one(self._held[seq], seq in over)

    def trim(self) -> None:
        """Give the system back what no sequence has."""
        for slot in np.flatnonzero(self._touched & (self._sharers == 0)).tolist():
            self._memory.drop(slot * self.bytes, self.bytes)
            self._touched[slot] = False

    def close(self) -> None:
        """Give the system all memory back."""
        self._memory.close()

    def _droppable(self, held: _SequenceStates, over: bool = False) -> list[_KeptState]:
        """Checkpoints that can be given up: until its last step is over none that it began with, or has yet
        to write."""
        return [s for s in held.states[:-1] if s.checkpoint and (over or s.position < held.began)]

    def _drop_one(self, held: _SequenceStates, over: bool = False) -> bool:
        """The checkpoint without which the least has to be computed again."""
        marks = self._droppable(held, over)
        if not marks:
            return False
        after = [*(s.position for s in marks[1:]), held.states[-1].position if over else held.began]
        gaps = [end - begin for begin, end in zip([0, *(s.position for s in marks)], after, strict=False)]
        s = marks[gaps.index(min(gaps))]
        held.states.remove(s)
        self._release(s.slot)
        return True

    def _make_room(self, wanted: int) -> None:
        """Checkpoints go for what is wanted; BudgetError if that is not enough."""
        while wanted > len(self._free):
            if not self.thin():
                raise BudgetError(f"all {self.slots} slots for states are in use; ask for fewer sequences")

    def _take(self) -> int:
        self._make_room(1)
        slot = self._free.pop()
        self._sharers[slot] = 1
        self._touched[slot] = True
        self._stamp += 1
        self.stamps[slot] = self._stamp
        return slot

    def _release(self, slot: int) -> None:
        self._sharers[slot] -= 1
        if not self._sharers[slot]:
            self._free.append(slot)
            self.overwrite(slot)
            self.stamps[slot] = 0


def _reserved(size: int, slots: int) -> tuple[ZeroedMemory, int]:
    """Address space for slots of a size, and for how many there is some."""
    while True:
        try:
            return ZeroedMemory(slots * size), slots
        except (OSError, OverflowError, ValueError) as e:
            if slots <= 4:
                raise BudgetError(
                    f"the system does not have enough address space for states of {format_bytes(size)}"
                ) from e
            slots //= 2
