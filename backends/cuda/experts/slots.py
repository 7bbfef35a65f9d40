"""Experts that come into slots of a GPU's memory, and others into their places, while the model runs.

A slot is one expert's part of each weight of a mixture, and lies where the weights of that many experts would
lie: the kernels that multiply by them see no difference. The router gives slots in place of experts, by a
table in the GPU's memory. So recorded work stays what it is, whatever lies in the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hetrun.backend import Buffers, ReadInto, WeightUse, slotted
from hetrun.backend.expert_slots import Bytes, ExpertArrival, Slots, Slotted, SlottedMixture, first_slots
from hetrun.backends.cuda import fusion, weights
from hetrun.backends.cuda.arena import in_arena
from hetrun.backends.cuda.driver import Address, Event
from hetrun.errors import DeviceLost
from hetrun.graph import Op
from hetrun.graph.ops import Moe

if TYPE_CHECKING:
    from hetrun.backends.cuda.gpu import Gpu


@dataclass(frozen=True, slots=True)
class WeightPart:
    """What experts have of one weight."""

    use: WeightUse
    address: Address  # of the first slot
    nbytes: int  # of an expert
    at: int  # where it begins in the memory from which it is copied


@dataclass(frozen=True, slots=True)
class LaidMixture(SlottedMixture):
    """A mixture, and where its slots lie."""

    parts: tuple[WeightPart, ...]
    table: Address


class GpuSlots:
    """Those of all mixtures on one GPU; see hetrun.backend.expert_slots.ExpertSlots."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.mixtures: dict[Slotted, LaidMixture] = {}
        self._sent: dict[int, Event] = {}
        self._numbers = 0

    def join(self, op: Op, buffers: Buffers) -> None:
        """Work is compiled for a mixture whose slots lie in these."""
        assert isinstance(op.attrs, Moe)
        parts, at = list[WeightPart](), 0
        for use in filter(lambda use: use.slots, fusion.uses(op)):
            nbytes = weights.device_bytes(use) // len(use.slots)
            parts.append(WeightPart(use, weights.held(buffers, use).address, nbytes, at))
            at += in_arena(nbytes)
        key, n = slotted(op), op.attrs.n_experts
        if key in self.mixtures:  # with all that has moved there since
            assert self.mixtures[key].parts == tuple(parts)
            return
        table = self._gpu.memory.take(first_slots(n, ()).nbytes, "slots of experts")
        self.mixtures[key] = LaidMixture(n, at, tuple(parts), table)
        self.tell(key, first_slots(n, op.attrs.slots))

    def table_of(self, op: Op) -> Address:
        """Where kernels find which slot each expert of a mixture has."""
        return self.mixtures[slotted(op)].table

    def tell(self, key: Slotted, slots: Slots) -> None:
        """From the next work on experts lie there."""
        self._gpu.memory.send(self.mixtures[key].table, slots.view(np.uint8))

    def leave(self, address: Address) -> None:
        """The memory of some slots, or of any other weight, is given back. What takes it next is written
        behind all that was given to one of the streams: nothing may be on its way there."""
        gone = [key for key, held in self.mixtures.items() if address in [p.address for p in held.parts]]
        for key in gone:
            self._gpu.memory.give(self.mixtures.pop(key).table)
        if gone:
            self._wait()

    def _wait(self) -> None:
        """Until nothing is on its way."""
        for event in self._sent.values():
            with suppress(DeviceLost):  # which brings nothing any more
                self._gpu.memory.driver.synchronize(event)

    def staging(self, nbytes: int) -> Bytes:
        """Memory of the host from which experts are copied."""
        return self._gpu.memory.driver.pinned(nbytes)

    def fill(self, key: Slotted, expert: int, memory: Bytes, read: ReadInto) -> None:
        """Read an expert, as the device wants it; from any thread."""
        if (held := self.mixtures.get(key)) is None:
            return  # given back meanwhile: it will not be sent
        for part in held.parts:
            part_of_it = weights.expert_of(part.use, expert)
            weights.fill(part.use, part_of_it, memory[part.at : part.at + part.nbytes], read)

    def send(self, coming: Sequence[ExpertArrival]) -> int:
        """Copy experts into slots; a number by which to ask whether they are there."""
        memory, number = self._gpu.memory, self._numbers
        memory.wait_for_work()
        for each in coming:
            for part in self.mixtures[each.key].parts:
                source = int(each.memory.ctypes.data) + part.at
                target = part.address + each.slot * part.nbytes
                memory.driver.copy(target, source, part.nbytes, memory.bringing)
        self._sent[number] = memory.driver.event()
        memory.driver.record(self._sent[number], memory.bringing)
        self._numbers += 1
        return number

    def arrived(self, number: int) -> bool:
        """Whether all of it is there; the number is forgotten then."""
        driver = self._gpu.memory.driver
        if not driver.happened(self._sent[number]):
            return False
        driver.drop(self._sent.pop(number))
        return True

    def clear(self) -> None:
        """Nothing of it is there any more."""
        self._wait()
        self.mixtures.clear()
        self._sent.clear()
