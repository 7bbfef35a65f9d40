"""The plan that was chosen for a bucket with two devices, and the reasons that people are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetrun.graph.signature import coarse
from hetrun.planner.online import USUAL, gain, passes_of
from hetrun.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """The plan of a bucket with two devices, what a pass takes, and what it took or would take otherwise."""

    plan: Plan
    seconds: float
    otherwise: float


def is_concurrent(plan: Plan) -> bool:
    """Whether a plan places less than whole units, as only plans with two devices do."""
    return any(p.share or coarse(p.scope) != p.scope for p in plan.placements)


def reason_of(new: Mapping[str, PlanChoice], left: Sequence[str], in_turn: str) -> str:
    """Why plans change: `new` ones with two devices by bucket, buckets that `left` such plans, and the reason
    for plans in which devices take turns, if any changes."""
    reasons = [in_turn] if in_turn else []
    if new:
        reasons.append(_gain_of(new))
    if left:
        reasons.append(f"passes of {', '.join(left)} tokens: both devices at the same time are not faster")
    return "; ".join(reasons) or "memory"


def _gain_of(new: Mapping[str, PlanChoice]) -> str:
    """What gains most, and what that is expected to be."""
    bucket = max(new, key=lambda b: USUAL[b] * (new[b].otherwise - new[b].seconds))
    c = new[bucket]
    names = " and ".join(dict.fromkeys(s.backend for s in c.plan.segments))
    shared = any(p.share for p in c.plan.placements)
    how = "operations divided between them" if shared else "layers balanced"
    passes = passes_of(bucket, len(new) - 1)
    return f"{passes}: {names} at the same time, {how} ({gain(c.otherwise, c.seconds)})"
