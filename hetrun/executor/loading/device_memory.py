"""Memory that devices have to themselves: what each may take, and what of a plan lies there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hetrun.backend import Backend, OwnMemory, WeightUse, looks_up
from hetrun.errors import BudgetError
from hetrun.graph import Graph, Op
from hetrun.graph.signature import Unit, units
from hetrun.memory import breakdown
from hetrun.planner.plan import Placement, PlanSet
from hetrun.system.units import format_bytes, format_minimum

Own = Mapping[str, OwnMemory]  # by backend
RowBytes = Callable[[Sequence[Op]], int]


def granted_to(backends: Mapping[str, Backend], vram: int | None) -> Own:
    """What each of them may take, of those that have memory to themselves."""
    return {name: own for name, backend in backends.items() if (own := backend.grant(vram))}


class DevicePlaces:
    """What of a model finds a place in the memory of devices."""

    def __init__(self, graph: Graph, backends: Mapping[str, Backend], own: Own, rows: RowBytes) -> None:
        """`rows`: bytes of keys and values that one sequence has for the attention among some ops."""
        self.graph = graph
        self._backends, self._own, self._rows = backends, own, rows

    def order(self) -> list[str]:
        """The backends in their order, but those behind the others whose memory has no room for all of it."""
        return sorted(self._backends, key=self.is_full)

    def is_full(self, name: str) -> bool:
        """Whether a device has no room for all that it could do."""
        if name not in self._own:
            return False
        return not self._fit(name, [op for op in self.graph.ops if self._backends[name].supports(op)])

    def _fit(self, name: str, ops: Sequence[Op]) -> bool:
        backend, own = self._backends[name], self._own[name]
        return backend.device_bytes(backend.wants(ops)) + max(0, self._rows(ops) - own.rows) <= own.room

    def homes(self) -> tuple[Placement, ...]:
        """Units for devices, as many as they have room for: the last ones, so that values change sides once
        and results are where the output matrix is. A table, of which a pass reads a few rows, is none."""
        found: list[Placement] = []
        left, mine = [name for name in self._backends if name in self._own], list[Op]()
        for unit in reversed(units(self.graph)):
            if any(looks_up(op) for op in unit.ops):
                continue
            while left and not self._takes(left[0], mine, unit):
                left, mine = left[1:], []
            if not left:
                break
            mine += unit.ops
            found.append(
                Placement(unit.scope, left[0], "RAM has no room for all weights; its own memory has")
            )
        return tuple(found)

    def _takes(self, name: str, mine: Sequence[Op], unit: Unit) -> bool:
        return all(map(self._backends[name].supports, unit.ops)) and self._fit(name, [*mine, *unit.ops])


def with_streaming(graph: Graph, backends: dict[str, Backend], own: Own, rows: RowBytes) -> Own:
    """Where a device has no room for all weights, the way of working in which they cross a link joins the
    backends; what it works in is no room for weights any more."""
    found, places = dict(own), DevicePlaces(graph, backends, own, rows)
    layers = [unit for unit in units(graph) if unit.scope.startswith("blk.")]
    for name in [name for name in own if places.is_full(name)]:
        backend = backends[name]
        able = [unit for unit in layers if all(map(backend.supports, unit.ops))]
        largest = max((backend.device_bytes(backend.wants(unit.ops)) for unit in able), default=0)
        if not largest:
            continue
        # Two layers at once where there is room for them; else calls of the device, one after the other.
        least = backend.most_needed_at_once([op for unit in able for op in unit.ops])
        if streaming := backend.streaming(largest) or (least < largest and backend.streaming(least)) or None:
            way, found[name] = streaming
            backends[way.name] = way
    return found


def whose_memory(name: str, own: Own) -> str:
    """The device in whose memory a backend works: itself, or the one that it is a second way to work on."""
    found = [device for device in own if f"{name}-".startswith(f"{device}-")]
    return max(found, key=len, default="")


def less_room(own: OwnMemory, nbytes: int) -> OwnMemory:
    """What a device may take, with so much of it for keys and values that was for weights."""
    return replace(own, besides=min(own.besides + nbytes, own.limit))


def within(plans: PlanSet, own: Own) -> PlanSet:
    """The same plans with the bill of each device as it may take memory now."""
    devices = dict(plans.devices)
    for name in own.keys() & devices.keys():
        lines = {**devices[name], breakdown.BESIDES: own[name].besides}
        devices[name] = breakdown.complete(lines, own[name].limit)
    return replace(plans, devices=devices)


def bills(
    backends: Mapping[str, Backend], own: Own, wanted: Mapping[str, Sequence[WeightUse]]
) -> dict[str, dict[str, int]]:
    """What takes how much there; BudgetError where that is more than there is."""
    found = {}
    for name in [name for name in own if name in backends]:
        weights, memory = backends[name].device_bytes(wanted.get(name, ())), own[name]
        if weights > memory.room:
            raise BudgetError(
                f"{format_bytes(memory.limit)} of device memory is too little for {name}: with the "
                f"weights placed there it needs {format_minimum(weights + memory.besides)}; allow "
                "more with --vram, or more backends"
            )
        lines = {breakdown.WEIGHTS: weights, breakdown.BESIDES: memory.besides}
        found[name] = breakdown.complete({line: n for line, n in lines.items() if n}, memory.limit)
    return found
