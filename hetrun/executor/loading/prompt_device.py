"""Prompts of a model whose weights come from disk, on a device: which plan that is, and what it takes.

The host computes a pass with pieces that stay in memory and others that come from disk, of a few hundred
tokens at most. A device through whose window weights cross may read all of them from their files instead, for
as many tokens as it has room for: one reading of the file for a whole prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetrun.backend import Backend, WeightUse, looks_up
from hetrun.executor.loading.device_memory import Own, RowBytes, whose_memory
from hetrun.executor.loading.memory_estimates import crossing_bytes
from hetrun.graph import Graph, Op, in_scope
from hetrun.graph.ops import Scale
from hetrun.planner.options import Options
from hetrun.planner.plan import BUCKETS, Placement, Plan, PlanSet, make_plans, place

# Of fewer tokens a pass is one of answers or drafts, which the host computes with what is in memory.
FOR_PROMPTS = BUCKETS[BUCKETS.index("17-32") :]
WHY = "it reads all weights from disk once for a long pass"
WORK_SHARE = 1 / 16  # of a budget that does not hold all weights, for what passes work in
ROWS_LEAVE = 0.7  # of the layers on a device must stay there where it is to run prompts of all layers as well


@dataclass(frozen=True, slots=True)
class PromptDevice:
    """How a device runs prompts."""

    backend: str  # the way in which weights cross
    device: str  # in whose memory it works
    ubatch: int  # the most tokens of a pass
    plans: Mapping[str, Plan]  # for long passes
    wanted: tuple[WeightUse, ...]
    factor: float  # what rows of the table of tokens are multiplied by
    nbytes: int  # that a pass reads
    host_bytes: int  # of the host's memory, for what is read ahead

    def over(self, plans: PlanSet) -> PlanSet:
        """The plans with those in which the device runs prompts."""
        why = f"as many as {self.device} has room for; {plans.ubatch} at once where the host computes"
        long = {bucket: plan for bucket, plan in self.plans.items() if bucket in plans.plans}
        return replace(
            plans,
            plans={**plans.plans, **long},
            ubatch=self.ubatch,
            ubatch_why=why,
            host_ubatch=plans.ubatch,
        )


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


def lookup(graph: Graph) -> tuple[Op, float] | None:
    """What looks tokens up, and what rows of the table are multiplied by; None where more is looked up than
    one row for each token."""
    found = [op for op in graph.ops if looks_up(op)]
    if len(found) != 1 or found[0].kind != "embed":
        return None
    scaled = next(op for op in graph.ops if op.out == graph.embedded)
    if scaled is found[0]:
        return scaled, 1.0
    if scaled.weights or not isinstance(scaled.attrs, Scale):
        return None
    return found[0], scaled.attrs.factor


def placements_of(
    graph: Graph, way: Backend, host: str, homes: Sequence[Placement], backends: Mapping[str, Backend]
) -> tuple[Placement, ...] | None:
    """Everything on a device, with what has its home there; the host looks tokens up. None where the device
    cannot do it all."""
    if (looked := lookup(graph)) is None:
        return None
    here = Placement(looked[0].scope, host, "rows of its table are read from their file")
    placements = (Placement("", way.name, WHY), *homes, here)
    for op, placed in zip(graph.ops, place(graph.ops, placements), strict=True):
        if not (placed is here or backends[placed.backend].supports(op)):
            return None
    return placements


def fits_beside(
    name: str, backends: Mapping[str, Backend], own: Own, held: Sequence[WeightUse], rows: int
) -> bool:
    """Whether a device has room for keys and values of all layers beside the weights that it holds."""
    memory = own[name]
    weights = backends[name].device_bytes(held) if held else 0
    return weights + max(0, rows - memory.rows) <= memory.room


def plans_for(
    graph: Graph, plans: PlanSet, placements: tuple[Placement, ...], backends: Mapping[str, Backend]
) -> dict[str, Plan]:
    """A plan for each bucket of long passes; none where the host would have to compute."""
    alone = [name for name, backend in backends.items() if backend.asynchronous]
    made = make_plans(graph, {b: (plans.plans[b].threads, placements) for b in FOR_PROMPTS}, alone)
    return made if all(plan.on_devices for plan in made.values()) else {}


def ways(backends: Mapping[str, Backend], own: Own) -> list[tuple[str, str]]:
    """Ways in which weights can cross from their files, each with its device."""
    found = [(name, whose_memory(name, own)) for name, b in backends.items() if b.bytes_from_files]
    return [(name, device) for name, device in found if device]
