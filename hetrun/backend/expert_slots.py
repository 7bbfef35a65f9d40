"""Experts in slots of a device's own memory: others may take their places while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hetrun.graph import Weight

Slots = NDArray[np.int32]  # of each expert of a mixture the slot in which it lies, or -1
Slotted = tuple[str, tuple[int, ...]]  # a mixture with slots: its router's name, and what lies there at first
Bytes = NDArray[np.uint8]
Read = Callable[[Weight, Bytes], None]


@dataclass(frozen=True, slots=True)
class SlottedMixture:
    """A mixture that has slots on a device."""

    experts: int  # of the whole mixture
    expert_bytes: int  # that cross when one of them comes


@dataclass(frozen=True, slots=True)
class ExpertArrival:
    """An expert on its way: of which mixture, to which slot, from where."""

    key: Slotted
    slot: int
    memory: Bytes


class ExpertSlots(Protocol):
    """What a device does that has slots. All but `fill` belongs to the engine's thread."""

    @property
    def mixtures(self) -> Mapping[Slotted, SlottedMixture]:
        """Those that work was compiled for, as long as their memory is there."""
        ...

    def tell(self, key: Slotted, slots: Slots) -> None:
        """From the next work on experts of a mixture lie there; at first they do as its key says."""
        ...

    def staging(self, nbytes: int) -> Bytes:
        """Memory of the host from which experts are copied. BudgetError where there is none."""
        ...

    def fill(self, key: Slotted, expert: int, memory: Bytes, read: Read) -> None:
        """Read an expert into such memory, as the device wants it. From any thread."""
        ...

    def send(self, coming: Sequence[ExpertArrival]) -> int:
        """Copy experts into slots that no pass uses from now on, and return a number by which to ask. Work
        that the device was given before may still read what lay there; no thread of the host waits."""
        ...

    def arrived(self, number: int) -> bool:
        """Whether all of what was sent is there. The number is forgotten then."""
        ...


def first_slots(n_experts: int, experts: Sequence[int]) -> Slots:
    """In which slot each expert lies in the beginning."""
    found = np.full(n_experts, -1, np.int32)
    found[list(experts)] = np.arange(len(experts))
    return found
