"""Weights besides those of whole units: what plans with two devices need of them, and what they take."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from hetrun.backend import Backend
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.online import HOLDS, Parts
from hetrun.planner.plan import Plan, PlanSet
from hetrun.planner.weight_sizes import PARTS, with_line

NO_PARTS: Parts = frozenset()


@dataclass(frozen=True, slots=True)
class PartsRoom:
    """What there is for parts."""

    host: int  # bytes of the host's memory
    own: Mapping[str, int]  # of that which a device has to itself
    whole: Parts  # weights that are there anyway, with whole units
    parts: Parts  # those that are there besides


class PartsHeld:
    """What parts take on each backend."""

    def __init__(self, backends: Mapping[str, Backend], alone: Collection[str], forecast: WorkTimes) -> None:
        """`alone`: backends that work by themselves, and hold something besides weights."""
        self._backends, self._alone, self._forecast = backends, alone, forecast

    def needed(self, plan: Plan) -> Parts:
        """The weights of a plan, in the form in which its backends want them."""
        return frozenset(
            (s.backend, use) for s in plan.segments for use in self._backends[s.backend].wants(s.ops)
        )

    def fit(self, parts: Parts, room: PartsRoom) -> bool:
        """Whether there is room for these, all of them."""
        new = parts - room.parts
        return self._bytes(parts) <= room.host and all(
            self.own_bytes(new, b) <= n for b, n in room.own.items()
        )

    def room_beside(self, room: PartsRoom, parts: Parts) -> PartsRoom:
        """What there is when these are there as well."""
        new = parts - room.parts
        own = {b: n - self.own_bytes(new, b) for b, n in room.own.items()}
        return PartsRoom(room.host - self._weights(new), own, room.whole, room.parts | parts)

    def own_bytes(self, parts: Parts, backend: str) -> int:
        """Bytes of weights in the memory that a device has to itself."""
        return self._backends[backend].device_bytes([use for b, use in parts if b == backend])

    def moved(self, parts: Parts, backend: str) -> int:
        """Bytes that come to lie anywhere for one backend."""
        mine = frozenset(part for part in parts if part[0] == backend)
        return self._weights(mine) + self.own_bytes(mine, backend)

    def billed(self, plans: PlanSet, parts: Parts) -> PlanSet:
        """Plans with the bill of what they need besides whole units."""
        memory = {name: size for name, size in plans.memory.items() if not name.startswith("parts for ")}
        for b in sorted({b for b, _ in parts}):
            if size := self._weights(frozenset(part for part in parts if part[0] == b)):
                memory[f"parts for {b}"] = size
        devices = {b: with_line(lines, PARTS, self.own_bytes(parts, b)) for b, lines in plans.devices.items()}
        return replace(plans, memory=memory, devices=devices)

    def _weights(self, parts: Parts) -> int:
        return sum(self._backends[b].resident_bytes([use]) for b, use in parts)

    def _bytes(self, parts: Parts) -> int:
        """Bytes of weights, and what backends hold besides that have no others."""
        fixed = {b for b, _ in parts if b in self._alone}
        return self._weights(parts) + sum(int(self._forecast.fact(HOLDS, b) or 0) for b in fixed)
