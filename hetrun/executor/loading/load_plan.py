"""Everything that is decided about a model before its weights are read: on what it runs, how long sequences
may become, and what of its weights is in memory.

What fits is held in memory. Where `--ram`, or what is free, is less than that, the weights are cut into
pieces, and those that do not fit come from disk for every pass (`hetrun.prefetch`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace

from hetrun.backend import Backend
from hetrun.errors import BudgetError
from hetrun.executor.loading.backend_selection import create_backends
from hetrun.executor.loading.context_length import ContextPlanner, TooLittle, kv_quant
from hetrun.executor.loading.device_memory import Own, bills
from hetrun.executor.loading.expert_plan import ExpertPlanner
from hetrun.executor.loading.load_budget import LoadBudget
from hetrun.executor.loading.load_parts import LoadChoice, LoadParts
from hetrun.executor.loading.mapped_plan import MappedPlanner
from hetrun.executor.loading.memory_estimates import HELPER, LIBRARIES
from hetrun.executor.loading.pieced_plan import PiecePlanner
from hetrun.executor.loading.placement_planner import PlacementPlanner, Wanted
from hetrun.executor.loading.plan_notes import about_states, about_vision, about_whole
from hetrun.executor.loading.prompt_device import PromptDevice, PromptDevices
from hetrun.executor.loading.resident_plan import ResidentPlanner
from hetrun.executor.mtp import PlannedBlock, plan_block
from hetrun.graph import Graph
from hetrun.graph.quant import QuantType
from hetrun.loader.architectures import build_graph
from hetrun.loader.source import ModelSource
from hetrun.memory.ledger import MemoryGrant, granted
from hetrun.planner.options import Options
from hetrun.planner.plan import PlanSet
from hetrun.prefetch.cached_experts import ExpertPart
from hetrun.prefetch.mapped_weights import MappedPart
from hetrun.prefetch.streamed_weights import StreamingPlan


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Everything that is decided about a model before its weights are read."""

    graph: Graph
    backends: dict[str, Backend]
    plans: PlanSet
    wanted: Wanted
    quant: QuantType
    context: int
    granted: MemoryGrant
    weights: int  # bytes of those that are read when the model is opened, as a whole
    kv_bytes: int  # that all sequences together may take
    kv_one: int  # of one of full length
    room: int  # bytes that weights may take, and what backends hold besides; 0: nothing beyond these
    streamed: StreamingPlan | None = None
    mapped: MappedPart | None = None
    own: Own = field(default_factory=dict)  # what devices may take of the memory that they have to themselves
    block: PlannedBlock | None = None  # that predicts one more token
    experts: ExpertPart | None = None
    prompts: PromptDevice | None = None  # what runs prompts, where weights come from disk


def prepare(source: ModelSource, options: Options, to_come: int = LIBRARIES) -> LoadPlan:
    """Decide; the backends are the caller's to close. So much of libraries is still `to_come`."""
    graph = build_graph(source, options.ctx, options.spatial)
    quant = kv_quant(graph, options.kv_type)
    backends = create_backends(options, graph)
    try:
        block = plan_block(source, backends, options.wishes, quant) if options.mtp != "off" else None
        return LoadPlanner(source, options, graph, backends, quant, to_come, block).decide()
    except BaseException:
        for backend in backends.values():
            backend.close()
        raise


class LoadPlanner:
    """Decides how a model's weights are held: the order in which the ways to do so are tried."""

    def __init__(
        self,
        source: ModelSource,
        options: Options,
        graph: Graph,
        backends: dict[str, Backend],
        quant: QuantType,
        to_come: int,
        block: PlannedBlock | None = None,
    ) -> None:
        grant = granted(options.ram)
        if options.ram is not None:  # a container may have less
            options = replace(options, ram=grant.nbytes)
        self._options = options
        self._contexts = contexts = ContextPlanner(source, options, graph, quant)
        self._placement = placement = PlacementPlanner(options, contexts, backends)
        self._budget = LoadBudget(options, contexts, backends, granted=grant, to_come=to_come, block=block)
        self._prompts = PromptDevices(options, backends, placement.own, contexts.row_bytes, grant.nbytes)
        parts = LoadParts(options, contexts, placement, self._budget, self._prompts)
        self._resident, self._experts = ResidentPlanner(parts), ExpertPlanner(parts)
        self._pieces, self._mapped = PiecePlanner(parts), MappedPlanner(parts)

    def decide(self) -> LoadPlan:
        """In the smallest of budgets the process that writes templates takes its memory from the reserve."""
        try:
            return self._decide()
        except TooLittle as e:
            self._placement.homes, self._budget.spared = (), min(HELPER, e.short)
            with suppress(TooLittle):
                return self._decide()
        self._placement.homes, self._budget.spared = (), HELPER
        try:
            return self._decide()
        except TooLittle as e:
            raise BudgetError(str(e)) from None  # which others know

    def _decide(self) -> LoadPlan:
        """All in memory, if that is possible: in RAM or in that of one device; else in both together."""
        placement, budget = self._placement, self._budget
        plans, wanted = placement.plan()
        self._leave_block_out(plans, wanted)
        if not budget.fits(plans, wanted):
            placement.homes = placement.places.homes()
            plans, wanted = placement.plan()
            if self._options.streaming != "off" and not budget.fits(plans, wanted):
                homes = self._prompts.leave_room(self._contexts.graph, placement.homes)
                placement.homes = self._pieces.choose_homes(homes)
                if found := self._not_in_memory():
                    return found
        return self._assemble(self._resident.plan(plans, wanted))

    def _leave_block_out(self, plans: PlanSet, wanted: Wanted) -> None:
        """Where it was not asked for by name, the block that predicts is no reason to read from disk. Where
        weights come from there anyway, each pass is worth more tokens with it."""
        budget, block = self._budget, self._budget.block
        if block and self._options.mtp == "auto" and not budget.fits(plans, wanted):
            budget.block = None
            if not budget.fits(plans, wanted):
                budget.block = block

    def _not_in_memory(self) -> LoadPlan | None:
        """Experts in slots, or weights in pieces, where that is possible; else mapped. None: nothing is."""
        try:
            choice = self._choose_from_disk()
        except TooLittle as e:  # the smallest budget of any way is the one to name
            for name in self._placement.backends:
                self._experts.refuse(name, e.short)
            raise
        return self._assemble(choice) if choice else None

    def _choose_from_disk(self) -> LoadChoice | None:
        backends, mmap = self._placement.backends, self._options.streaming == "mmap"
        if not mmap:
            for name in backends:
                if cached := self._experts.plan(name):
                    return cached
        pieces = self._pieces.cut()
        fits = pieces and self._budget.is_enough(pieces.fixed, pieces.plans)
        if mmap or not fits:
            why = "--streaming mmap" if fits else "weights that cannot be cut into pieces do not fit"
            for name in backends:
                if mapped := self._mapped.plan(name, why):
                    return mapped
        return self._pieces.plan(pieces) if pieces else None

    def _assemble(self, choice: LoadChoice) -> LoadPlan:
        """Everything that is decided, with what is to be said about it."""
        contexts, placement, budget = self._contexts, self._placement, self._budget
        graph, backends, context = contexts.graph, placement.backends, choice.context
        notes = (
            *choice.plans.notes,
            *about_states(graph, contexts.quant),
            *about_vision(contexts.source, self._options.vision),
            *about_whole(backends),
        )
        plans = replace(
            choice.plans,
            devices=bills(backends, placement.own, choice.wanted),
            notes=notes,
            context=context.tokens,
            context_why=context.why,
        )
        return LoadPlan(
            graph=graph,
            backends=backends,
            plans=plans,
            wanted=choice.wanted,
            quant=contexts.quant,
            context=context.tokens,
            granted=budget.granted,
            weights=choice.weights,
            kv_bytes=choice.kv_bytes,
            kv_one=contexts.kv_bytes(plans)(context.tokens),
            room=choice.room,
            streamed=choice.streamed,
            mapped=choice.mapped,
            own={name: own for name, own in placement.own.items() if name in backends},
            block=budget.block,
            experts=choice.experts,
            prompts=choice.prompts,
        )
