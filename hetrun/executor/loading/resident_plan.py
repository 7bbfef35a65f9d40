"""Weights that all fit into the memory of the host and of devices."""

from __future__ import annotations

from dataclasses import replace

from hetrun.executor.loading.load_parts import LoadChoice, LoadParts
from hetrun.executor.loading.memory_estimates import crossing_bytes, kv_of_all, work_bytes
from hetrun.executor.loading.placement_planner import Wanted
from hetrun.memory import breakdown
from hetrun.planner.plan import PlanSet
from hetrun.planner.rates import Residence


class ResidentPlanner:
    """Plans of a model with all weights in memory."""

    def __init__(self, parts: LoadParts) -> None:
        self._contexts, self._placement = parts.contexts, parts.placement
        self._budget, self._prompts = parts.budget, parts.prompts

    def plan(self, plans: PlanSet, wanted: Wanted) -> LoadChoice:
        """The plans for as long a context as there is room for; BudgetError where there is none."""
        contexts, placement, budget = self._contexts, self._placement, self._budget
        parts = budget.parts()  # measured once: the bill must add up
        held = sum(parts.values())
        all_weights = budget.weights(wanted)
        plans = self._lengthen_passes(plans, held + all_weights)
        work = self._work(plans)
        tight = not budget.is_enough(held + all_weights + work, plans)
        context = contexts.choose(held + all_weights + (0 if tight else work), plans)
        context = placement.fit_context(context, plans, wanted)
        if contexts.rebuild(context.tokens):
            again, wanted = placement.plan()
            plans = replace(
                again, ubatch=plans.ubatch, ubatch_why=plans.ubatch_why, host_ubatch=plans.host_ubatch
            )
        weights, one = budget.weights(wanted), contexts.kv_bytes(plans)(context.tokens)
        free = budget.nbytes - held
        of_all = kv_of_all(one, free - weights - (0 if tight else work))
        paid = {breakdown.WEIGHTS: weights, breakdown.KV_ONE: one, breakdown.KV_ALL: of_all}
        # Where there is less, passes work in the reserve, and rows get no more than what is left.
        if (work := min(work, free - weights - of_all)) > 0:
            paid[breakdown.WORK] = work
        paid = breakdown.complete({**paid, **parts}, budget.nbytes)
        there, room = Residence(weights, weights, weights), max(weights, free - of_all)
        plans = replace(plans, memory=paid, weights=there)
        return LoadChoice(plans, wanted, context, weights, of_all, room)

    def _work(self, plans: PlanSet) -> int:
        """What passes work in on the host: of as many tokens as it computes at once, or as devices do."""
        graph = self._contexts.graph
        own = work_bytes(graph, plans.host_ubatch or plans.ubatch)
        return max(own, crossing_bytes(graph, plans.ubatch)) if plans.host_ubatch else own

    def _lengthen_passes(self, plans: PlanSet, held: int) -> PlanSet:
        """Passes of as many tokens as a device takes, where plans may come to run prompts there alone:
        weights that do not stay there cross for each pass, however many tokens it has. The host's passes stay
        as long as they are."""
        if not self._prompts.decides_passes or self._placement.homes:
            return plans
        ops, backends = self._contexts.graph.ops, self._placement.backends
        devices = {n: b.most_at_once(ops) for n, b in backends.items() if b.asynchronous}
        most = max(devices.values(), default=0)
        while most > plans.ubatch:
            why = f"as many as {max(devices, key=lambda n: devices[n])} has room for; {plans.ubatch} at once "
            why += "where the host computes"
            longer = replace(plans, ubatch=most, ubatch_why=why, host_ubatch=plans.ubatch)
            if held + self._work(longer) + self._contexts.usual_kv(longer) <= self._budget.nbytes:
                return longer
            most //= 2
        return plans
