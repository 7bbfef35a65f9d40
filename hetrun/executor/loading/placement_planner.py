"""Which backend runs what of a model, and which weights each of them must hold for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetrun.backend import Backend, Segment, WeightUse
from hetrun.executor.loading.context_length import Context, ContextPlanner, longest
from hetrun.executor.loading.device_memory import DevicePlaces, bills, granted_to, with_streaming
from hetrun.executor.mtp import PlannedBlock
from hetrun.memory.kv.paged_allocator import BLOCK
from hetrun.planner.options import Options, this_machine
from hetrun.planner.plan import Placement, PlanSet
from hetrun.planner.static import StaticPlanner

Wanted = dict[str, list[WeightUse]]  # by backend
OF_BYTES = 5e-3  # the error of a product whose activations are rounded to 8 bits, in parts of its size


class PlacementPlanner:
    """The backends of a model, what they may take of their own memory, and plans of what each runs."""

    def __init__(self, options: Options, contexts: ContextPlanner, backends: dict[str, Backend]) -> None:
        """A backend in which weights cross a link joins the `backends` where a device has too little room."""
        self._options, self._contexts, self.backends = options, contexts, backends
        own = granted_to(backends, options.vram)
        self.own = with_streaming(contexts.graph, backends, own, contexts.row_bytes)
        self.homes: tuple[Placement, ...] = ()  # on devices, because RAM has no room for all
        self._allowed = list(backends)

    @property
    def places(self) -> DevicePlaces:
        """What of the model finds a place on devices."""
        return DevicePlaces(self._contexts.graph, self.backends, self.own, self._contexts.row_bytes)

    def plan(
        self, backends: Mapping[str, Backend] | None = None, why: str = "", before: str = ""
    ) -> tuple[PlanSet, Wanted]:
        """The plan set, and which weights each backend must hold for it. `before`: a backend that has
        everything without a home, whatever the order is."""
        backends, options = self.backends if backends is None else backends, self._options
        places = self.places
        order = sorted((name for name in places.order() if name in backends), key=lambda name: name != before)
        planner = StaticPlanner(backends, order, self.homes, options.rule, why)
        plans = planner.plan(places.graph, this_machine(), options.wishes)
        wanted: dict[str, dict[WeightUse, None]] = {name: {} for name in backends}
        for segment in dict.fromkeys(_segments(plans)):
            wanted[segment.backend].update(dict.fromkeys(backends[segment.backend].wants(segment.ops)))
        plans = replace(plans, precision="fast" if _rounds_to_bytes(plans, backends) else "exact")
        return plans, {name: list(uses) for name, uses in wanted.items()}

    def plan_on(self, name: str) -> tuple[PlanSet, Wanted, Segment | None]:
        """All that has no home on a device planned for one backend, and what that runs; None where that is
        more than one segment."""
        some = {name: self.backends[name]} | {h.backend: self.backends[h.backend] for h in self.homes}
        others = self._allowed != [name]
        why = f"the first of {', '.join(self._allowed)} that can read weights from disk" if others else ""
        plans, wanted = self.plan(some, why, name)
        mine = [s for s in dict.fromkeys(_segments(plans)) if s.backend == name]
        plans = replace(plans, devices=bills(some, self.own, wanted))
        return plans, wanted, mine[0] if len(mine) == 1 else None

    def fit_context(self, context: Context, plans: PlanSet, wanted: Wanted) -> Context:
        """As long as the devices have room for keys and values of the layers that have their home there."""
        if self._options.ctx:
            return context
        for name in self.own.keys() & wanted.keys():
            own, backend = self.own[name], self.backends[name]
            ops = [op for s in plans.plan(1).segments if s.backend == name for op in s.ops]
            room = own.room + own.rows - backend.device_bytes(wanted[name])
            rows = self._contexts.sequence_bytes(ops, plans.ubatch)
            if (tokens := max(BLOCK, longest(context.tokens, rows, room))) < context.tokens:
                context = Context(tokens, f"what {name} has room for")
        return context

    def close_unused(self, plans: PlanSet, block: PlannedBlock | None) -> None:
        """Close backends that neither these plans nor the block that predicts has a use for: plans of a model
        with weights from disk stay."""
        used = {*plans.backends, *([block.backend] if block else ())}
        for other in [name for name in self.backends if name not in used]:
            self.backends.pop(other).close()


def _segments(plans: PlanSet) -> Sequence[Segment]:
    """Those of all plans, of each that differs once."""
    return [s for p in {id(p.stages): p for p in plans.plans.values()}.values() for s in p.segments]


def _rounds_to_bytes(plans: PlanSet, backends: Mapping[str, Backend]) -> bool:
    """Whether products of the plan round activations to 8 bits: only some backends do that with `fast`."""
    if any(b.exact for b in backends.values()):
        return False
    return any(backends[s.backend].rounding(op) >= OF_BYTES for s in _segments(plans) for op in s.ops)
