"""What passes are measured by: the time that the fixed order is predicted to take on a quiet machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log

from hetrun.planner.costmodel import OpWork, WorkTimes
from hetrun.planner.online import OnlinePlanner
from hetrun.planner.plan import Plan, PlanSet

DEPTHS = 8  # bits of a depth: passes that see about as many tokens take about as long
UNKNOWN_S, UNKNOWN_TOKENS = 1e-3, 8  # of a token, and what a pass takes besides, where they are unknown

Size = tuple[int, float, bool]  # tokens, how many each sees, and whether they are of several sequences


class Yardstick:
    """For passes of any size. It follows what is known; what passes took stays what it was."""

    def __init__(self, planner: OnlinePlanner, forecast: WorkTimes, fixed: Mapping[str, Plan]) -> None:
        """`fixed`: by bucket the plans of the fixed order."""
        self._planner, self._forecast, self._fixed = planner, forecast, fixed
        self._found: dict[tuple[str, int, int, bool], tuple[float, bool]] = {}
        self._sizes: dict[str, Size] = {}  # of the last pass of each bucket

    def seconds(self, bucket: str, tokens: int, depth: float, several: bool) -> tuple[float, bool]:
        """What a pass is predicted to take, and whether that is a prediction: where nothing was measured, it
        is something that grows as passes do."""
        if (bucket, tokens, int(depth) >> DEPTHS, several) not in self._found:
            self._planner.costs.fresh()
        return self._as_known(bucket, tokens, depth, several)

    def _as_known(self, bucket: str, tokens: int, depth: float, several: bool) -> tuple[float, bool]:
        """The same by what the planner last asked the forecast; asking again for each size takes long."""
        key = bucket, tokens, int(depth) >> DEPTHS, several
        if key not in self._found:
            found = self._planner.pass_seconds(self._fixed[bucket], tokens, depth, several)
            self._found[key] = (found or UNKNOWN_S * (tokens + UNKNOWN_TOKENS), bool(found))
        return self._found[key]

    def of_pass(self, bucket: str, tokens: int, depth: float, several: bool) -> float:
        """The same of a pass that ran."""
        self._sizes[bucket] = tokens, depth, several
        return self.seconds(bucket, tokens, depth, several)[0]

    def prior(self, plan: Plan, plans: PlanSet) -> float:
        """A plan by this yardstick, as predicted for a quiet machine: a logarithm. Call `renew` before."""
        tokens, depth, several = self._sizes.get(plan.bucket) or (*typical(plan.bucket, plans), False)
        yard, known = self._as_known(plan.bucket, tokens, depth, several)
        seconds = self._planner.believed_seconds(plan, tokens, depth, several)
        return log(seconds / yard) if seconds and known else 0.0

    def rough(self, plan: Plan, plans: PlanSet) -> float:
        """How far off, relative, the times may be that a plan rests on."""
        costs, found, total = self._planner.costs, 0.0, 0.0
        tokens, depth = typical(plan.bucket, plans)
        for s in plan.segments:
            for i, times in costs.kinds(s):
                seconds = times * (costs.seconds(i, s.backend, plan.threads, tokens, depth) or 0.0)
                total += seconds
                found += seconds * self._forecast.rough(OpWork(costs.units[i].form, s.backend, plan.threads))
        return found / total if total else 0.0

    def renew(self) -> Iterator[tuple[str, float]]:
        """Ask the forecast anew; by bucket, how much longer passes are by what it says, as logarithms."""
        before = {bucket: self.seconds(bucket, *size)[0] for bucket, size in self._sizes.items()}
        self._found.clear()
        self._planner.costs.fresh()
        for bucket, old in before.items():
            new, _ = self._as_known(bucket, *self._sizes[bucket])
            if old != new:
                yield bucket, log(old / new)


def typical(bucket: str, plans: PlanSet) -> tuple[int, float]:
    """A pass of a bucket: tokens, and how many each of them sees."""
    found = plans.expected.get(bucket)
    return (found.tokens, found.depth) if found else (1, 1.0)
