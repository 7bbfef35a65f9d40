"""What the weights of a model's units take, on each backend that could hold them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from hetrun.backend import Backend, OwnMemory
from hetrun.graph import Op
from hetrun.graph.signature import Unit
from hetrun.memory import breakdown
from hetrun.planner.plan import PlanSet
from hetrun.planner.residency import Copy

RowBytes = Callable[[Sequence[Op]], int]  # of the keys and values that a text has in the layers of ops
COPIES, PARTS = "copies", "parts"  # of weights that a device got besides those of the first plan


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the host's memory, and of the memory that a device has to itself."""

    host: Mapping[Copy, int]
    own: Mapping[Copy, int]
    # Of that memory what keys and values of a text take with a copy, beside what they have there in any case.
    rows: Mapping[Copy, int] = field(default_factory=dict)

    def moved(self, copies: Iterable[Copy]) -> int:
        """Bytes that come to lie anywhere."""
        return sum(self.host[c] + self.own[c] for c in copies)

    def own_total(self, copies: Iterable[Copy], backend: str) -> int:
        """Bytes in the memory of one device."""
        return sum(self.own[c] for c in copies if c[1] == backend)

    def claim(self, copy: Copy) -> int:
        """Bytes in the memory of its device for which a copy needs room."""
        return self.own[copy] + self.rows.get(copy, 0)

    def claimed(self, copies: Iterable[Copy], backend: str) -> int:
        """The same of all copies on one device."""
        return sum(self.claim(c) for c in copies if c[1] == backend)

    def billed(self, plans: PlanSet, brought: Collection[Copy], itself: Mapping[str, int]) -> PlanSet:
        """Plans with the bill of copies that were brought in besides what it has; `itself` is what a backend
        takes when it has no others."""
        memory, devices = dict(plans.memory), dict(plans.devices)
        for b in dict.fromkeys(b for _, b in self.host):
            mine = [c for c in brought if c[1] == b]
            if size := sum(self.host[c] for c in mine):
                memory[breakdown.copies_for(b)] = size
            if self.moved(mine):
                memory[f"{b} itself"] = itself.get(b, 0)
            if b in devices:
                devices[b] = with_line(devices[b], COPIES, self.own_total(mine, b))
        return replace(plans, memory=memory, devices=devices)


def with_line(bill: Mapping[str, int], name: str, nbytes: int) -> dict[str, int]:
    """A bill with another number for something, or without it where that is none."""
    others = {other: size for other, size in bill.items() if other != name}
    return others | ({name: nbytes} if nbytes else {})


def rows_of(
    units: Sequence[Unit], copies: Iterable[Copy], own: Mapping[str, OwnMemory], row_bytes: RowBytes
) -> dict[Copy, int]:
    """What keys and values take with each copy, where all that could be on a device take more than is kept
    for them there: each its part of that."""
    sizes = [row_bytes(unit.ops) for unit in units]
    whole, found = sum(sizes), dict[Copy, int]()
    for i, name in copies:
        if name in own and sizes[i]:
            found[i, name] = int(sizes[i] * max(0.0, 1 - own[name].rows / whole))
    return found


def sizes_of(units: Sequence[Unit], backends: Mapping[str, Backend], able: Sequence[Set[str]]) -> Sizes:
    """Of each unit on all backends that are able to run it."""
    wanted = {
        (i, name): backend.wants(unit.ops)
        for i, unit in enumerate(units)
        for name, backend in backends.items()
        if name in able[i]
    }
    return Sizes(
        {c: backends[c[1]].resident_bytes(uses) for c, uses in wanted.items()},
        {c: backends[c[1]].device_bytes(uses) for c, uses in wanted.items()},
    )
