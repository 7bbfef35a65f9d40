"""What is not in use is compared now and then with what is: what does not run would never be measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, inf, log

from hetrun.executor.autotune.measurement.prober import HASTY_DOUBT, Prober, Slices
from hetrun.executor.autotune.measurement.survey import estimate, in_slices
from hetrun.executor.autotune.tuned_model import TunedModel
from hetrun.graph import Op
from hetrun.graph.signature import of_wanted_rows
from hetrun.planner.online import PlanConditions
from hetrun.planner.plan import BUCKETS, Plan
from hetrun.planner.trials import Trial

SURE = 0.1  # how far off, relative, what was measured in quiet is believed to be
CHANGED = 0.1  # a logarithm: more is news
LEAST_SPREAD = 0.05  # of a comparison: parts of a pass are no pass
LARGEST_LENT = 64 << 20  # bytes of weights that are brought in for a comparison: some 50 ms
LARGE = 0.05  # of a pass's time: smaller parts are not tried elsewhere
LONGEST_S = 0.04  # of one run: an answer waits for its next token meanwhile, so larger passes are cut...
IDLE_LONGEST_S = 0.2  # ...and of an idle engine, which a request may reach meanwhile
SEEN = 0.5  # of the time that counts for a bucket, once something of it was tried: others have their turn
FADING = 0.9  # of what was seen before, from one trial to the next


Place = tuple[int, str, str]  # a unit, where it runs, and where it could


@dataclass(slots=True)
class PlanComparison:
    """One that has begun: what runs now, and what could."""

    here: Trial
    there: Trial
    crowded: bool
    slices: Slices
    found: Sequence[Sequence[float]] = ()


class Explorer:
    """Runs one unit at a time where it does not run, in passes like the recent ones."""

    def __init__(self, model: TunedModel, prober: Prober) -> None:
        self._planner, self._executor, self._prober = model.planner, model.executor, prober
        self._store, self._backends, self._forecast = model.store, model.backends, model.forecast
        self._context, self._room = model.setup.context, model.setup.room
        self._turn, self._longest = 0, LONGEST_S
        self._tried: dict[tuple[str, str], int] = {}  # form and backend -> the turn of its last comparison
        self._open: PlanComparison | None = None

    def step(self, now: PlanConditions, allowed: Collection[str], crowded: bool, idle: bool) -> float | None:
        """A slice of a comparison, which may take longer while the engine is `idle`; in the end by how much
        an estimate was off, as a logarithm (infinite: there was none). None: it goes on the next time."""
        self._longest = IDLE_LONGEST_S if idle else LONGEST_S
        if self._open is None:
            pair = self._choose(now, allowed, idle)
            if pair is None:
                return 0.0
            if pair[0] is pair[1]:
                return self._run_alone(pair[0])
            self._open = PlanComparison(*pair, crowded, in_slices(self._prober, pair, crowded))
        found = next(self._open.slices, None)
        if found is not None:
            self._open.found = found
            return None
        done = self._open
        self.close()
        return self._learn(done)

    @property
    def trying(self) -> str:
        """The backend that a comparison is about."""
        return self._open.there.backend if self._open else ""

    def close(self) -> None:
        """End a comparison that goes on: its graphs and sequences are given back."""
        if self._open:
            self._open.slices.close()
            self._prober.give_back(self.trying)  # memory is for what plans need
            self._open = None

    def _choose(
        self, now: PlanConditions, allowed: Collection[str], idle: bool
    ) -> tuple[Trial, Trial] | None:
        """What is tried next, beside what runs now; None if nothing can be."""
        recent = self._executor.recent
        bucket = max(BUCKETS, key=lambda b: recent[b].seconds)
        if not recent[bucket].passes:
            return None
        recent[bucket].seconds *= SEEN
        for r in recent.values():
            r.passes *= FADING
        self._planner.costs.fresh()
        plans = self._executor.plans
        plan = plans.plans[bucket]
        tokens, depth = self._planner.point(bucket, plans.ubatch, now)
        found = self._alternatives(plan, tokens, depth, allowed, idle)
        if found:
            unit, used, name = self._next(found)
            pair = self._trial(unit, used, plan, tokens, depth), self._trial(unit, name, plan, tokens, depth)
        pairs = [pair] if found else []
        more = self._planner.other_trials(plan, min(depth, self._context - 1))
        pairs += [(t, t) for t in more if t.backend in allowed and self._has(t.backend, t.ops[0], idle)]
        if not pairs:
            return None
        self._turn += 1
        return pairs[self._turn % len(pairs)]

    def _next(self, found: Mapping[Place, float]) -> Place:
        """What has waited longest for its turn; larger parts of a pass wait less."""
        self._turn += 1

        def waited(place: Place) -> float:
            unit, _, name = place
            form = self._planner.units[unit].form
            return found[place] * (self._turn - self._tried.get((form, name), 0))

        chosen = max(found, key=waited)
        self._tried[self._planner.units[chosen[0]].form, chosen[2]] = self._turn
        return chosen

    def _trial(self, unit: int, name: str, plan: Plan, tokens: int, depth: float) -> Trial:
        """A unit on a backend, in a pass that is not too long."""
        chosen = self._planner.units[unit]
        if of_wanted_rows(chosen.ops):
            return Trial("again", chosen.form, (chosen.ops,), name, plan.threads, 1)
        names = {b for b in self._backends if b in self._planner.costs.able[unit]}
        while tokens > 1 and self._slowest(unit, names, plan, tokens, depth) > self._longest:
            tokens //= 2
        behind = max(0, int(min(depth, self._context - tokens) - (tokens + 1) / 2))
        return Trial("again", chosen.form, (chosen.ops,), name, plan.threads, tokens, behind)

    def _slowest(self, unit: int, names: Collection[str], plan: Plan, tokens: int, depth: float) -> float:
        return max(self._seconds(unit, name, plan, tokens, depth) or 0.0 for name in names)

    def _seconds(self, unit: int, name: str, plan: Plan, tokens: int, depth: float) -> float | None:
        return self._planner.costs.seconds(unit, name, plan.threads, tokens, depth)

    def _learn(self, done: PlanComparison) -> float:
        """Beside other programs only the ratio of the two says something."""
        here, there = done.here, done.there
        (mine, mine_spread), (theirs, their_spread) = (estimate(t, done.crowded) for t in done.found)
        before_mine, before = self._forecast_of(here), self._forecast_of(there)
        spread = max(LEAST_SPREAD, hypot(mine_spread, their_spread))
        if before_mine is None or before is None:
            rough = HASTY_DOUBT if done.crowded else 0.0
            scale = 1.0 if before_mine is None else before_mine / mine
            if before_mine is None:
                self._note(here, mine, rough)
            if before is None:
                self._note(there, theirs * scale, rough)
            return inf
        off = log(theirs / mine) - log(before / before_mine)
        believed = max(SURE, self._forecast.rough(there.work), self._forecast.rough(here.work))
        if abs(off) > 3 * hypot(believed, spread):
            believed = abs(off) / 2
        gain = believed**2 / (believed**2 + spread**2)
        # What counts is the ratio of the two, and that is known better now.
        rough = believed * (1 - gain) ** 0.5 if done.crowded else 0.0
        # What is known was measured in quiet, or beside others, as this was.
        scale = before_mine / mine if done.crowded and not self._forecast.rough(here.work) else 1.0
        for trial, seconds, was in ((here, mine * scale, before_mine), (there, theirs * scale, before)):
            factor = (seconds / was) ** gain
            for threads in self._planner.threads:
                work = replace(trial.work, threads=threads)
                for one in (work, work.other):
                    self._forecast.rescale(one, factor, trial.tokens * trial.sequences, rough)
            self._note(trial, seconds, rough)
        return gain * off if abs(gain * off) > 2 * spread else 0.0

    def _note(self, trial: Trial, seconds: float, rough: float) -> None:
        self._forecast.learn(trial.work, *trial.size, seconds, rough)

    def _forecast_of(self, trial: Trial) -> float | None:
        return self._forecast.seconds(trial.work, trial.tokens, trial.seen + (trial.tokens + 1) / 2)

    def _run_alone(self, trial: Trial) -> float:
        """What a device does by itself beside passes is compared with nothing."""
        found: list[float] = []
        before = self._forecast_of(trial)
        self._prober.measure(trial, found.append, once=True)
        off = log(found[0] / before) if before else 0.0
        if abs(off) > CHANGED:
            self._forecast.rescale(trial.work, exp(off), trial.tokens)
        self._forecast.learn(trial.work, trial.tokens, trial.seen + (trial.tokens + 1) / 2, found[0])
        return off

    def _alternatives(
        self, plan: Plan, tokens: int, depth: float, allowed: Collection[str], idle: bool
    ) -> Mapping[Place, float]:
        """What takes a good part of a bucket's passes, and how many seconds; if there is anything of which
        nothing is known, only that."""
        costs = self._planner.costs
        times: dict[str, float] = {}
        first: dict[str, tuple[int, str]] = {}
        for s in plan.segments:
            for i in costs.members(s):
                form = costs.units[i].form
                first.setdefault(form, (i, s.backend))
                seconds = costs.seconds(i, s.backend, plan.threads, tokens, depth) or 0.0
                times[form] = times.get(form, 0.0) + seconds
        found = {
            (unit, used, name): times[form]
            for form, (unit, used) in first.items()
            for name in allowed
            if name != used and name in costs.able[unit] and self._has(name, costs.units[unit].ops, idle)
        }
        unknown = {
            (unit, used, name): 1.0
            for unit, used, name in found
            if None in [costs.seconds(unit, b, plan.threads, tokens, depth) for b in (used, name)]
        }
        least = LARGE * sum(times.values())
        return unknown or {place: seconds for place, seconds in found.items() if seconds > least}

    def _has(self, name: str, ops: Sequence[Op], idle: bool) -> bool:
        """Whether the weights are there, or may come for a trial and go again: to a device, or to a backend
        that a wrong measurement keeps out of all plans, while the engine is idle."""
        backend = self._backends[name]
        wanted = backend.wants(ops)
        if backend.asynchronous or self._store.holds(name, wanted):
            return True
        size = backend.resident_bytes(wanted)
        return idle and size <= min(LARGEST_LENT, self._room - self._store.resident_bytes)
