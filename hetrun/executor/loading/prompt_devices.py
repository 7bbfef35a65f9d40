"""Devices that can run prompts while weights come from disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetrun.backend import Backend
from hetrun.executor.loading.device_memory import Own, RowBytes
from hetrun.executor.loading.memory_estimates import (
    crossing_bytes,
)
from hetrun.executor.loading.prompt_device import (
    PromptDevice,
    fits_beside,
    lookup,
    placements_of,
    plans_for,
    ways,
)
from hetrun.graph import Graph, in_scope
from hetrun.planner.options import Options
from hetrun.planner.plan import Placement, Plan, PlanSet

WORK_SHARE = 1 / 16  # of a budget that does not hold all weights, for what passes work in
ROWS_LEAVE = 0.7  # of the layers on a device must stay there where it is to run prompts of all layers as well


class PromptDevices:
    """Which device runs long prompts, and what that leaves of the weights there."""

    def __init__(
        self, options: Options, backends: Mapping[str, Backend], own: Own, rows: RowBytes, nbytes: int
    ) -> None:
        """`rows`: bytes of keys and values for some ops; `nbytes`: of the budget."""
        self._options, self._backends, self._own = options, backends, own
        self._rows, self._nbytes = rows, nbytes

    def choose(
        self, graph: Graph, host: str, plans: PlanSet, homes: Sequence[Placement]
    ) -> PromptDevice | None:
        """A device that runs prompts with weights from disk; None where none can, or has no room for the keys
        and values of all layers, or the host none for what crosses."""
        if not self.decides_passes:
            return None
        for name, device in ways(self._backends, self._own):
            way = self._backends[name]
            placements = placements_of(graph, way, host, homes, self._backends)
            if placements is None or not self._has_room_for_rows(graph, device, homes):
                continue
            ubatch, room = way.most_at_once(graph.ops), WORK_SHARE * self._nbytes
            while ubatch > plans.ubatch and crossing_bytes(graph, ubatch) > room:
                ubatch //= 2
            made = plans_for(graph, plans, placements, self._backends)
            if made and ubatch > plans.ubatch and way.bytes_from_files <= room:
                return self._made(graph, way, device, ubatch, made)
        return None

    def _made(
        self, graph: Graph, way: Backend, device: str, ubatch: int, plans: Mapping[str, Plan]
    ) -> PromptDevice:
        segments = next(iter(plans.values())).segments
        wanted = tuple(use for s in segments if s.backend == way.name for use in way.wants(s.ops))
        found = lookup(graph)
        assert found
        nbytes = sum(use.weight.nbytes for use in wanted if way.streams(use))
        return PromptDevice(way.name, device, ubatch, plans, wanted, found[1], nbytes, way.bytes_from_files)

    @property
    def decides_passes(self) -> bool:
        """Whether nothing that was asked for says how prompts run."""
        options, wishes = self._options, self._options.wishes
        fixed = wishes.ubatch or wishes.plan or wishes.deterministic or options.rule
        return options.measures and not fixed

    def _has_room_for_rows(self, graph: Graph, device: str, homes: Sequence[Placement]) -> bool:
        """Whether a device has room for keys and values of all layers beside what has its home there."""
        mine = [home.scope for home in homes if home.backend == device]
        ops = [op for op in graph.ops if any(in_scope(op.scope, scope) for scope in mine)]
        held = self._backends[device].wants(ops) if ops else ()
        return fits_beside(device, self._backends, self._own, held, self._rows(graph.ops))

    def leave_room(self, graph: Graph, homes: tuple[Placement, ...]) -> tuple[Placement, ...]:
        """As many of them as leave room for keys and values of all layers on the device that can run prompts,
        unless that is most of them: a prompt is read from disk once instead of once for some hundred tokens,
        and each answer reads a little more."""
        if not self.decides_passes:
            return homes
        for _, device in ways(self._backends, self._own):
            fewer = homes
            while fewer and not self._has_room_for_rows(graph, device, fewer):
                fewer = fewer[:-1]
            if len(fewer) >= ROWS_LEAVE * len(homes) and self._has_room_for_rows(graph, device, fewer):
                return fewer
        return homes
