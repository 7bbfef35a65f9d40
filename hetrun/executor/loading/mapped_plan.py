"""Weights that do not fit into a budget and are used where they lie in their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetrun.executor.loading.load_parts import LoadChoice, LoadParts
from hetrun.executor.loading.memory_estimates import kv_of_all, work_bytes
from hetrun.memory import breakdown
from hetrun.planner.rates import Residence
from hetrun.prefetch.mapped_weights import MappedPart
from hetrun.system.units import format_bytes


class MappedPlanner:
    """Plans of a model on one backend, with some weights mapped."""

    def __init__(self, parts: LoadParts) -> None:
        self._contexts, self._placement, self._budget = parts.contexts, parts.placement, parts.budget

    def plan(self, name: str, why: str) -> LoadChoice | None:
        """Everything on this backend, some weights where they lie in their files; None where it cannot."""
        contexts, placement, budget = self._contexts, self._placement, self._budget
        backend = placement.backends[name]
        if (mapping := backend.mapping()) is None:
            return None
        plans, wanted, segment = placement.plan_on(name)
        held = budget.besides() + work_bytes(contexts.graph, plans.ubatch)
        room = budget.room(plans, held)
        weights = mapping.choose(segment.ops, room) if segment else ()
        if not (segment and weights):
            return None
        left = backend.resident_bytes([use for use in wanted[name] if use.weight not in weights])
        least = held + left + mapping.least(segment.ops, weights)
        context = contexts.choose(least, plans, whole=False)
        one = contexts.kv_bytes(plans)(context.tokens)
        of_all = kv_of_all(one, budget.nbytes - least)
        room = budget.nbytes - held - left - of_all
        mapping.map(weights, room)
        placement.close_unused(plans, budget.block)
        paid: Mapping[str, int] = {
            breakdown.WEIGHTS: left,
            breakdown.MAPPED: room,
            breakdown.KV_ONE: one,
            breakdown.KV_ALL: of_all,
            breakdown.WORK: held - budget.besides(),
            **budget.parts(),
        }
        size = sum(weight.nbytes for weight in weights)
        notes = (
            f"{format_bytes(size)} of weights are mapped ({why}): what a pass needs of them is read as soon "
            "as that is known, and what has not been used for longest is evicted",
        )
        there = Residence(left + size, left + min(size, room), left + min(size, room))
        memory = breakdown.complete(paid, budget.nbytes)
        plans = replace(plans, memory=memory, notes=notes, weights=there)
        mapped = MappedPart(mapping, size, left, room, budget.nbytes, least + one)
        return LoadChoice(plans, wanted, context, left, of_all, mapped=mapped)
