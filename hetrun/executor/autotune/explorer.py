"""What is not in use is tried now and then: whatever nobody runs, nobody measures."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hetrun.backend import Backend
from hetrun.executor.autotune.prober import Prober
from hetrun.executor.executor import Executor
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import Op
from hetrun.graph.signature import of_wanted_rows
from hetrun.planner.costmodel import Work
from hetrun.planner.online import Now, OnlinePlanner
from hetrun.planner.plan import BUCKETS, Plan
from hetrun.planner.residency import Copy
from hetrun.planner.trials import Trial

SURPRISE = 0.25  # a trial that is so far off has met something new: what was measured before does not count
DOUBTS = 2  # slow trials in a row are another program's doing; the next one is believed
LARGE = 0.05  # of a pass's time: smaller parts are not tried elsewhere
LONGEST_S = 0.015  # of one run: somebody waits for the next token meanwhile, so larger passes are cut
FADING = 0.9  # of what was seen of late, from one trial to the next


class Explorer:
    """Runs one unit at a time where it does not run, in passes as they are of late."""

    def __init__(
        self,
        planner: OnlinePlanner,
        executor: Executor,
        prober: Prober,
        store: WeightStore,
        backends: Mapping[str, Backend],
        context: int,
    ) -> None:
        self._planner, self._executor, self._prober = planner, executor, prober
        self._store, self._backends, self._context = store, backends, context
        self._turn = 0
        self._doubted: Work | None = None  # what was slower than expected the last time that it was tried
        self._doubts = 0  # times in a row

    def choose(self, now: Now, allowed: Collection[str]) -> Trial | None:
        """What is tried next; None if nothing can be."""
        recent = self._executor.recent
        bucket = max(BUCKETS, key=lambda b: recent[b].passes)
        seen = recent[bucket].passes >= 1
        for r in recent.values():
            r.passes *= FADING
        if not seen:
            return None
        self._planner.costs.fresh()
        plans = self._executor.plans
        plan = plans.plans[bucket]
        tokens, depth = self._planner.point(bucket, plans.ubatch, now)
        choices = [
            self._trial(c, plan, tokens, depth) for c in self._alternatives(plan, tokens, depth, allowed)
        ]
        more = self._planner.other_trials(plan, min(depth, self._context - 1))
        choices += [t for t in more if t.backend in allowed and self._holds(t.backend, t.ops[0])]
        if not choices:
            return None
        again = [trial for trial in choices if trial.work == self._doubted]
        if not again:
            self._turn += 1
            self._doubted, self._doubts = None, 0
        return again[0] if again else choices[self._turn % len(choices)]

    def _trial(self, copy: Copy, plan: Plan, tokens: int, depth: float) -> Trial:
        """A unit on another backend, in a pass that is not too long."""
        unit, name = copy
        chosen = self._planner.units[unit]
        if of_wanted_rows(chosen.ops):
            return Trial("again", chosen.form, (chosen.ops,), name, plan.threads, 1)
        while tokens > 1 and (self._seconds(unit, name, plan, tokens, depth) or 0.0) > LONGEST_S:
            tokens //= 2
        behind = max(0, int(min(depth, self._context - tokens) - (tokens + 1) / 2))
        return Trial("again", chosen.form, (chosen.ops,), name, plan.threads, tokens, behind)

    def _seconds(self, unit: int, name: str, plan: Plan, tokens: int, depth: float) -> float | None:
        return self._planner.costs.seconds(unit, name, plan.threads, tokens, depth)

    def run(self, trial: Trial) -> None:
        """Try it; a time that is slower than expected is tried again first."""
        believed = self._prober.again(trial, SURPRISE, last=self._doubts == DOUBTS)
        self._doubted, self._doubts = (None, 0) if believed else (trial.work, self._doubts + 1)

    def _alternatives(self, plan: Plan, tokens: int, depth: float, allowed: Collection[str]) -> list[Copy]:
        """What takes a good part of a bucket's passes, on backends where it could run and does not."""
        costs = self._planner.costs
        times: dict[str, float] = {}
        first: dict[str, tuple[int, str]] = {}
        for s in plan.segments:
            for i in costs.members(s):
                form = costs.units[i].form
                first.setdefault(form, (i, s.backend))
                seconds = costs.seconds(i, s.backend, plan.threads, tokens, depth) or 0.0
                times[form] = times.get(form, 0.0) + seconds
        large = [form for form, t in times.items() if t > LARGE * sum(times.values())]
        return [
            (unit, name)
            for unit, used in (first[form] for form in large)
            for name in allowed
            if name != used and name in costs.able[unit] and self._holds(name, self._planner.units[unit].ops)
        ]

    def _holds(self, name: str, ops: Sequence[Op]) -> bool:
        return self._store.holds(name, self._backends[name].wants(ops))
