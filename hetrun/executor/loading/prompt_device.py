"""Prompts of a model whose weights come from disk, on a device: which plan that is, and what it takes.

The host computes a pass with pieces that stay in memory and others that come from disk, of a few hundred
tokens at most. A device through whose window weights cross may read all of them from their files instead, for
as many tokens as it has room for: one reading of the file for a whole prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetrun.backend import Backend, WeightUse, looks_up
from hetrun.executor.loading.device_memory import Own, whose_memory
from hetrun.graph import Graph, Op
from hetrun.graph.ops import Scale
from hetrun.planner.plan import BUCKETS, Placement, Plan, PlanSet, make_plans, place

# Of fewer tokens a pass is one of answers or drafts, which the host computes with what is in memory.
FOR_PROMPTS = BUCKETS[BUCKETS.index("17-32") :]
WHY = "it reads all weights from disk once for a long pass"


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
