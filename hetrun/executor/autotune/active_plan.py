"""The plans in force: what was planned, with as many threads as get a core, and what passes take by them."""

from __future__ import annotations

from collections.abc import Sequence

from hetrun.executor.autotune.thread_count import Crew, manned
from hetrun.executor.compiled_plan import Ran
from hetrun.executor.executor import Executor
from hetrun.planner.online import OnlinePlanner
from hetrun.planner.plan import PlanSet

DEPTHS = 8  # bits of a depth: passes that see about as many tokens take about as long
FRESH = 4  # looks for which a prediction is good: it takes half a millisecond to make


class InForce:
    """Puts plans into force, and knows what their passes should take."""

    def __init__(self, planner: OnlinePlanner, executor: Executor, crew: Crew, alters: bool) -> None:
        """`alters`: whether threads may be fewer than planned at all."""
        self.crew = crew
        self.planned = executor.plans  # for free cores
        self._planner, self._executor, self._alters = planner, executor, alters
        self._why = ""  # the threads are others than planned
        self._expected: dict[tuple[int, bool, int], float | None] = {}
        self._looks = 0
        if alters:
            executor.hear = self._hear

    def adopt(self, plans: PlanSet) -> None:
        """Run by these plans from the next step on."""
        self.planned = plans
        self._expected.clear()
        self._executor.adopt(manned(plans, self.crew, self._why))

    # --- threads

    def look(self, at: float) -> str:
        """See whether others take cores or gave them back; the reason if there are other threads now."""
        if not self._alters or not self.crew.due(at):
            return ""
        why = self.crew.decide(at)
        self._looks += 1
        if why or self._looks % FRESH == 0:
            self._expected.clear()
        self._why = why or self._why
        plans = manned(self.planned, self.crew, self._why)
        if _threads(plans) != _threads(self._executor.plans):
            self._executor.adopt(plans)
        return why

    def _hear(self, ran: Ran) -> None:
        key = ran.tokens, ran.several, int(ran.depth) >> DEPTHS
        if key not in self._expected:
            self._planner.costs.fresh()
            plan = self.planned.plan(ran.tokens)
            self._expected[key] = self._planner.pass_seconds(plan, ran.tokens, ran.depth, ran.several)
        self.crew.hear(ran, self._expected[key])

    # --- predictions

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        """Seconds of a step: so many tokens of each sequence, each behind so many others; None: unknown."""
        self._planner.costs.fresh()
        total, ubatch = 0.0, self.planned.ubatch
        if len(chunks) > 1:
            n = sum(tokens for tokens, _ in chunks)
            depth = sum(tokens * (seen + (tokens + 1) / 2) for tokens, seen in chunks) / n
            return self.predict_pass(n, depth, several=True)
        for tokens, seen in chunks:
            for at in range(0, tokens, ubatch):
                n = min(ubatch, tokens - at)
                seconds = self.predict_pass(n, seen + at + (n + 1) / 2)
                if seconds is None:
                    return None
                total += seconds
        return total

    def predict_pass(self, tokens: int, depth: float, several: bool = False) -> float | None:
        """Seconds of one pass."""
        plan = self.planned.plan(tokens)
        seconds = self._planner.pass_seconds(plan, tokens, depth, several)
        if seconds is None:
            return None
        threads = self.crew.threads(plan.bucket, plan.threads)
        fewer = self.crew.factor(plan.bucket, threads) if threads < plan.threads else 1.0
        return fewer * seconds + self._executor.between_s


def _threads(plans: PlanSet) -> list[int]:
    return [p.threads for p in plans.plans.values()]
