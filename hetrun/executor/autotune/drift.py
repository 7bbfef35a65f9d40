"""When a plan is looked at again: times that it rests on have drifted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetrun.planner.costmodel import OpWork, WorkTimes
from hetrun.planner.online import OnlinePlanner, PlanConditions
from hetrun.planner.plan import PlanSet
from hetrun.planner.segment_cost import size_of

DRIFT = 0.1  # of a time
SHORTEST_REST_S, LONGEST_REST_S = 0.5, 60.0  # between two changes
REMEMBERED = 4  # plans
MANY, FAR = 8.0, 256.0  # recent passes, and tokens: what is rare or near is no reason to plan anew


@dataclass(slots=True)
class WatchedTime:
    """A time that the plan in force rests on."""

    work: OpWork
    tokens: int
    depth: float
    seconds: float
    used: bool


class Watcher:
    """Knows the times that the plans in force rest on, and how often plans changed."""

    def __init__(self, planner: OnlinePlanner, forecast: WorkTimes) -> None:
        self._planner, self._forecast = planner, forecast
        self._watched: list[WatchedTime] = []
        self._depths: dict[str, float] = {}  # bucket -> what the plan was made for
        self._rest = SHORTEST_REST_S
        self._before: list[dict[str, tuple[int, list[str]]]] = []  # the last plans, by bucket
        self.ready_at = 0.0  # no change before this moment

    def watch(self, plans: PlanSet, now: PlanConditions, candidates: Iterable[str]) -> None:
        """Note the times of what is in use, and of what is not."""
        costs, found = self._planner.costs, dict[tuple[OpWork, int], WatchedTime]()
        self._depths = {bucket: self._planner.point(bucket, plans.ubatch, now)[1] for bucket in plans.plans}
        for bucket, plan in plans.plans.items():
            tokens, depth = self._planner.point(bucket, plans.ubatch, now)
            used = {
                OpWork(costs.units[i].form, s.backend, plan.threads): costs.units[i].ops
                for s in plan.segments
                for i in costs.members(s)
            }
            used |= {OpWork(costs.form(s), s.backend, plan.threads): s.ops for s in plan.segments}
            others = {OpWork(u.form, b, plan.threads): u.ops for u in costs.units for b in candidates}
            more = self._planner.rests_on(plan, tokens)
            for work, ops in (dict.fromkeys(more, ()) | others | used).items():
                n, seen = size_of(ops, tokens, depth) if ops else (tokens, depth)
                if seconds := self._forecast.seconds(work, n, seen):
                    uses = more.get(work, work in used)
                    found[work, n] = WatchedTime(work, n, seen, seconds, uses)
        self._watched = list(found.values())

    def drifted(self) -> str:
        """What was in use and became slower, or was not and became faster; empty if nothing did."""
        for w in self._watched:
            seconds = self._forecast.seconds(w.work, w.tokens, w.depth)
            off = 0.0 if seconds is None else seconds / w.seconds - 1
            if off > DRIFT if w.used else off < -DRIFT:
                word = w.work.form.rpartition("-")[0]
                return (
                    f"{word} on {w.work.backend} takes {1000 * (1 + off) * w.seconds:.3g} ms, "
                    f"not {1000 * w.seconds:.3g}, for {w.tokens} tokens"
                )
        return ""

    def moved(self, now: PlanConditions) -> str:
        """Whether sequences have become much longer or shorter than the plan was made for; empty if not."""
        for bucket, depth in now.depth.items():
            before = self._depths.get(bucket, depth)
            longer, shorter = max(depth, before), min(depth, before)
            if now.passes[bucket] > MANY and longer > 2 * shorter and longer - shorter > FAR:
                return f"tokens see {depth:.0f} others, not {before:.0f}, in passes of {bucket} tokens"
        return ""

    def changed(self, plans: PlanSet, at: float) -> None:
        """Other plans are in force; bringing anything back that was there before makes the next wait."""
        plan = {b: (p.threads, [s.backend for s in p.segments]) for b, p in plans.plans.items()}
        last = self._before[-1] if self._before else plan
        back = any(p != last[b] and any(p == old[b] for old in self._before) for b, p in plan.items())
        self._rest = min(2 * self._rest, LONGEST_REST_S) if back else max(SHORTEST_REST_S, self._rest / 2)
        self._before = [*self._before[1 - REMEMBERED :], plan]
        self.ready_at = at + self._rest

    def rest(self, at: float, seconds: float) -> None:
        """No change for so long."""
        self.ready_at = max(self.ready_at, at + seconds)
