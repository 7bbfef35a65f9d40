"""Experts of the host that come into a device's slots when tokens choose them often: a cache that follows
the text, under a plan that stays what it is.

Which slots there are follows from the plan. In a pass the device computes the experts that have one while the
host computes the others, and both are told at its beginning which these are; nothing changes until it ends.
After a pass some experts are read for the device by a thread of their own, into page-locked memory. Before a
later pass they are sent: the expert that goes is computed by the host from then on, and the one that comes
by the device once a pass begins and finds all of it there. So no pass waits for any of that.

Passes of many tokens choose nearly all experts. They are not counted, and change nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import Chosen, Pass
from hetrun.backend.expert_slots import (
    Bytes,
    ExpertArrival,
    ExpertSlots,
    Slots,
    Slotted,
    SlottedMixture,
    first_slots,
)
from hetrun.client.events import DeviceSlots
from hetrun.errors import HetrunError
from hetrun.executor.slot_rule import SlotChange, SlotRule
from hetrun.loader.weight_reader import FileReader
from hetrun.prefetch.expert_trace import HitShares, judge_layers

MOST_TOKENS = 16  # of a pass whose choices are counted
STAGED, STAGED_BYTES = 8, 16 << 20  # experts on their way at once, at least one

TRACED = 512  # passes whose choices are remembered, to compare what was found with what could have been
NONE = np.zeros((0, 3), np.int32)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Residents:
    """What lies in the slots of one mixture."""

    mixture: SlottedMixture
    slots: Slots
    moving: NDArray[np.bool_]  # experts that come, or give their slot up soon


@dataclass(slots=True)
class ExpertMove:
    """An expert on its way to a slot."""

    key: Slotted
    residents: Residents
    change: SlotChange
    memory: Bytes
    slot: int = -1  # once it is sent there
    error: Exception | None = None


@dataclass(slots=True)
class _Pipeline:
    """A thread that reads experts, and the memory that they are read to."""

    asked: SimpleQueue[ExpertMove | None] = field(default_factory=SimpleQueue)
    read: deque[ExpertMove] = field(default_factory=deque)
    free: list[Bytes] = field(default_factory=list)
    thread: Thread | None = None


class DeviceExperts:
    """Those of one device. All but the reading belongs to the engine's thread."""

    def __init__(self, slots: ExpertSlots) -> None:
        self._slots = slots
        self._known: dict[Slotted, Residents] = {}
        # By router the numbers of its mixtures: two while one plan follows another.
        self._by_router: dict[str, list[int]] = {}
        # Of all mixtures, a row for each: their slots, what moves, and which experts there are.
        self._table = np.zeros((0, 0), np.int32)
        self._moving = self._exists = np.zeros((0, 0), np.bool_)
        self._rule = SlotRule(0, 0)
        self._heard = list[tuple[int, NDArray[np.integer[Any]]]]()  # of a mixture what tokens have chosen
        self._line = _Pipeline()
        self._pieces = self._staged = 0  # of that memory, and bytes of each
        self._sent: list[tuple[int, Sequence[ExpertMove]]] = []
        self._passes = 0  # that have begun and not ended: of all but the last one something stands still
        self._off = False  # nothing moves any more
        self._chosen = self._found = self._came = 0
        self._trace: deque[NDArray[np.int32]] = deque(maxlen=TRACED)

    # --- passes

    def begin(self, work: Pass) -> None:
        """A pass begins: what lies where until it ends."""
        if not self._passes:
            self._follow()
            if not self._off:
                self._settle()
        self._passes += 1
        if not self._known:
            return
        work.residents = {**work.residents, **{key: known.slots for key, known in self._known.items()}}
        if len(work.tokens) <= MOST_TOKENS:
            work.chosen = self._listening(work.chosen)
            self._rule.age(len(work.tokens))

    def end(self) -> None:
        """It has ended, maybe in the middle."""
        self._passes -= 1
        self._count()
        if self._known and not self._off and not self._passes:
            self._ask()

    def _listening(self, others: Chosen | None) -> Chosen:
        def hear(router: str, chosen: NDArray[np.integer[Any]]) -> None:
            if others:
                others(router, chosen)
            self._hear(router, chosen)

        return hear

    def _hear(self, router: str, chosen: NDArray[np.integer[Any]]) -> None:
        self._heard += [(number, chosen.reshape(-1).copy()) for number in self._by_router.get(router, ())]

    def _count(self) -> None:
        """Take note of what was heard, of all mixtures at once: a pass has dozens."""
        if not self._heard:
            return
        numbers = np.repeat([n for n, _ in self._heard], [chosen.size for _, chosen in self._heard])
        chosen = np.concatenate([chosen for _, chosen in self._heard])
        found = self._table[numbers, chosen] >= 0
        self._rule.observe(numbers, chosen)
        self._chosen += chosen.size
        self._found += int(found.sum())
        self._trace.append(np.stack((numbers, chosen, found), axis=1).astype(np.int32))
        self._heard.clear()

    # --- between passes

    def _settle(self) -> None:
        """Take note of what has arrived, and send what was read."""
        before = self._table.copy()
        for step in (self._land, self._send, lambda: self._tell(before)):
            try:
                step()
            except HetrunError as e:  # the pass itself meets a device that is lost
                self._give_up(e)

    def _tell(self, before: Slots) -> None:
        """Have the device know what has changed."""
        changed = (self._table != before).any(axis=1)
        for key, known in compress(self._known.items(), changed):
            self._slots.tell(key, known.slots)

    def _follow(self) -> None:
        """The mixtures that have slots now; what was counted of those that stay is kept."""
        found = self._slots.mixtures
        if self._is_known(found):
            return
        old, before = self._rule, {key: i for i, key in enumerate(self._known)}
        shape = len(found), max((m.experts for m in found.values()), default=0)
        self._table, self._rule = np.full(shape, -1, np.int32), SlotRule(*shape)
        self._moving, self._exists = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        known, self._by_router = dict[Slotted, Residents](), {}
        for i, (key, mixture) in enumerate(found.items()):
            slots, moving = self._table[i, : mixture.experts], self._moving[i, : mixture.experts]
            self._exists[i, : mixture.experts] = True
            residents = self._known.get(key)
            if residents and residents.mixture is mixture:
                slots[:], moving[:] = residents.slots, residents.moving
                residents.slots, residents.moving = slots, moving
            else:
                slots[:] = first_slots(mixture.experts, key[1])
                residents = Residents(mixture, slots, moving)
            known[key] = residents
            self._by_router.setdefault(key[0], []).append(i)
            same = before.get(key, next((n for k, n in before.items() if k[0] == key[0]), None))
            if same is not None:
                self._rule.counts[i, : mixture.experts] = old.counts[same, : mixture.experts]
        self._known = known
        self._trace.clear()  # its numbers are others now

    def _is_known(self, found: Mapping[Slotted, SlottedMixture]) -> bool:
        if len(found) != len(self._known):
            return False
        return all(key in found and found[key] is known.mixture for key, known in self._known.items())

    def _land(self) -> None:
        """What is all there is computed on the device from now on."""
        for number, moves in [sent for sent in self._sent if self._slots.arrived(sent[0])]:
            self._sent.remove((number, moves))
            for move in moves:
                comes = move.change.comes
                move.residents.slots[comes] = move.slot
                move.residents.moving[comes] = False
                self._line.free.append(move.memory)
                self._came += 1

    def _send(self) -> None:
        """Send what was read. The experts whose slots it takes are computed by the host from now on."""
        moves = list[ExpertMove]()
        while self._line.read:
            move = self._line.read.popleft()
            if move.error:
                raise HetrunError(str(move.error)) from move.error
            if self._known.get(move.key) is move.residents:
                moves.append(move)
            else:
                self._line.free.append(move.memory)
        if not moves:
            return
        for move in moves:
            slots, goes = move.residents.slots, move.change.goes
            move.slot, slots[goes] = int(slots[goes]), -1
            move.residents.moving[goes] = False
        coming = [ExpertArrival(move.key, move.slot, move.memory) for move in moves]
        self._sent.append((self._slots.send(coming), moves))

    # --- what comes next

    def _ask(self) -> None:
        """Have experts read that should come."""
        free = self._free()
        if not free:
            return
        lies, rests = self._table >= 0, ~self._moving & self._exists
        keys = list(self._known)
        for change in self._rule.changes(lies & rests, ~lies & rests, free):
            residents = self._known[keys[change.mixture]]
            residents.moving[[change.comes, change.goes]] = True
            self._line.asked.put(ExpertMove(keys[change.mixture], residents, change, self._line.free.pop()))

    def _free(self) -> int:
        """How many more may be on their way."""
        most = max(known.mixture.expert_bytes for known in self._known.values())
        if most > self._staged:
            if len(self._line.free) < self._pieces:
                return 0  # until all memory is free, and larger one takes its place
            try:
                self._pieces = max(1, min(STAGED, STAGED_BYTES // most))
                self._line.free = [self._slots.staging(most) for _ in range(self._pieces)]
            except HetrunError as e:
                self._give_up(e)
                return 0
            self._staged = most
        if self._line.thread is None:
            self._line.thread = Thread(target=self._read_on, name="experts for a device", daemon=True)
            self._line.thread.start()
        return len(self._line.free)

    def _read_on(self) -> None:
        """What the thread does."""
        while (move := self._line.asked.get()) is not None:
            try:
                reader = FileReader()
                try:
                    self._slots.fill(move.key, move.change.comes, move.memory, reader.read)
                finally:
                    reader.close()
            except Exception as e:
                move.error = e
            self._line.read.append(move)

    def _give_up(self, error: Exception) -> None:
        """What lies in slots stays there."""
        if not self._off:
            log.warning("experts stay where they are, on the host or on a device: %s", error)
        self._off = True

    # --- how well that goes

    @property
    def report(self) -> DeviceSlots | None:
        """What was found in slots so far; None where there are none."""
        if not self._known:
            return None
        slots, experts = (
            sum(len(key[1]) for key in self._known),
            sum(len(k.slots) for k in self._known.values()),
        )
        return DeviceSlots(slots, experts, self._chosen, self._found, self._came)

    def hit_shares(self) -> HitShares | None:
        """The same lately, beside other rules; None where too little was chosen."""
        return judge_layers([len(key[1]) for key in self._known], np.concatenate([NONE, *self._trace]))

    def close(self) -> None:
        """End the thread; nothing runs any more."""
        if self._line.thread:
            self._line.asked.put(None)
            self._line.thread.join()
            self._line.thread = None
