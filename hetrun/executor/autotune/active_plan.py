"""The plans in force: for each bucket the one that passes run by now, with as many threads as pay now.

The planner decides for a quiet machine; a bandit for each bucket (`planner/bandit.py`) decides which of its
plans, of earlier ones and of the fixed order runs the next pass, by what passes take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from statistics import median
from time import perf_counter

from hetrun.executor.autotune.crowd_watch import CrowdWatch
from hetrun.executor.autotune.decisions import SPARE, in_words, of_threads, same_places
from hetrun.executor.autotune.state import Change
from hetrun.executor.autotune.thread_trials import ThreadTrials, key_of
from hetrun.executor.autotune.tuned_model import TunedModel
from hetrun.executor.autotune.usage import PassUsage
from hetrun.executor.autotune.yardstick import Yardstick
from hetrun.executor.compiled_plan import PassTiming
from hetrun.planner.bandit import CERTAIN, EVENT, JUMP, PROVEN, ROUGH, Arm, Race, TrialBudget, Verdict
from hetrun.planner.online import PlanConditions, weight_of
from hetrun.planner.plan import BUCKETS, Placement, Plan, PlanSet, make_plans
from hetrun.planner.residency import Copy

RENEWED = 4  # looks for which the yardstick is good: it takes half a millisecond to make
BELIEVED = 20  # passes that show how it is now, where it is unknown what other programs do
SURPRISE = 0.1  # a logarithm: so far off is a prediction that plans should not rest on any more
FEW = BUCKETS[:4]  # whose passes mostly wait for memory; in the others cores compute


class ActivePlan:
    """Puts plans into force and on trial, and knows what their passes take."""

    def __init__(self, model: TunedModel, crowd: CrowdWatch, cores: int) -> None:
        executor = model.executor
        self.planned = executor.plans  # in force, with the threads that were planned
        self.budget, self.usage = TrialBudget(), PassUsage()
        self._planner, self._executor, self._crowd = model.planner, executor, crowd
        self._most_threads = model.setup.threads[-1]
        self._graph, self._alone = model.graph, dict[str, Mapping[str, Plan]]()
        self._fixed = executor.plans.plans  # the fixed order: always among what may run
        self._yard = Yardstick(model.planner, model.forecast, self._fixed)
        self._verdicts: list[Verdict] = []
        self._races = {
            b: Race(b, self.budget, self._verdicts.append, key_of(self._fixed[b])) for b in BUCKETS
        }
        self._threads = ThreadTrials(model.setup.threads, cores, self._races, self._yard, crowd)
        self._due: set[str] = set()  # buckets in which a pass ran
        for bucket, plan in self._fixed.items():
            self._races[bucket].offer(key_of(plan), plan, 0.0, CERTAIN)
            self._races[bucket].put_in_force(key_of(plan))

    # --- plans

    def rough(self, plan: Plan) -> float:
        """How far off, relative, the times may be that a plan rests on."""
        return self._yard.rough(plan, self.planned)

    def adopt(self, plans: PlanSet, proven: bool = True, also: Mapping[str, Plan] | None = None) -> bool:
        """What is new in these plans is put into force, or on trial where it was not measured well, with what
        is worth a trial besides; whether anything is new."""
        self._renew()
        new, taken = False, dict(self.planned.plans)
        for bucket, plan in plans.plans.items():
            race, key, before = self._races[bucket], key_of(plan), self.planned.plans[bucket]
            new = new or not race.knows(key)
            self._offer(race, plan, plans)
            if proven and key != key_of(before):
                race.put_in_force(key)
                taken[bucket] = race.standing.plan
            self._vary(race)
        for bucket, plan in (also or {}).items():
            self._offer(self._races[bucket], plan, plans)
        self.planned = replace(plans, plans=taken)
        self.refresh()
        self._run()
        return new

    def _offer(self, race: Race, plan: Plan, plans: PlanSet) -> None:
        doubt = max(CERTAIN, self._yard.rough(plan, plans))
        race.offer(key_of(plan), plan, self._yard.prior(plan, plans), doubt)

    def offer_alone(self, names: Sequence[str]) -> None:
        """Backends that hold everything may also run all of it, whatever the planner thinks of that."""
        for name in names:
            if name not in self._alone:
                placed = (Placement("", name, f"all of it on {name}"),)
                everywhere = dict.fromkeys(BUCKETS, (self._most_threads, placed))
                self._alone[name] = make_plans(self._graph, everywhere)
            for bucket, plan in self._alone[name].items():
                race = self._races[bucket]
                self._offer(race, replace(plan, threads=race.standing.plan.threads), self.planned)

    def refresh(self) -> None:
        """Estimates have changed: so has what is thought of plans by which no pass has run since."""
        self._renew()
        for race in self._races.values():
            plans = {key: arm.plan for key, arm in race.arms.items()}
            priors = {key: self._yard.prior(plan, self.planned) for key, plan in plans.items()}
            doubts = {key: max(CERTAIN, self.rough(plan)) for key, plan in plans.items()}
            race.refresh(priors, doubts, perf_counter())
            self._threads.recall(race)

    def tell_planner(self) -> None:
        """How far off its predictions are for plans that share out single operations."""
        off = {bucket: self._shared_off(race) for bucket, race in self._races.items()}
        wrong = {bucket: each for bucket, each in off.items() if abs(each) > SURPRISE}
        for bucket, each in wrong.items():
            self._planner.observe(bucket, exp(each))
        if wrong:  # else nothing has changed that plans were judged by
            self.refresh()

    def surprised(self) -> str:
        """Whether passes that share out operations take another time than was predicted; empty if not."""
        for bucket, race in self._races.items():
            off = self._shared_off(race)
            if self._planner.needs_parts(race.standing.plan) and abs(off) > SURPRISE:
                word = "longer" if off > 0 else "less"
                took = f"{abs(exp(off) - 1):.0%} {word}"
                return f"passes of {bucket} tokens on two devices take {took} than planned"
        return ""

    def _shared_off(self, race: Race) -> float:
        """How much longer plans that share out operations took than predicted, beside others: a logarithm."""
        sure = [arm for arm in race.arms.values() if arm.runs]
        mine = [arm for arm in sure if self._planner.needs_parts(arm.plan)]
        if not mine:
            return 0.0
        longer = [arm.mean - arm.prior for arm in sure if arm not in mine]
        last = max(mine, key=lambda arm: arm.at)
        off = last.mean - last.prior - (median(longer) if longer else 0.0)
        # The first passes bring weights, which later ones find; twice as long is too long for that.
        return off if last.runs >= PROVEN or abs(off) > EVENT else 0.0

    def _renew(self) -> None:
        for bucket, longer in self._yard.renew():
            self._races[bucket].rebase(longer)

    def remove(self, gone: Callable[[Plan], bool]) -> None:
        """Plans that cannot run any more: a backend failed, or weights went."""
        plans = dict(self.planned.plans)
        for bucket, race in self._races.items():
            race.remove(gone)
            if gone(plans[bucket]):
                plans[bucket] = race.standing.plan
        self.planned = replace(self.planned, plans=plans)
        self._run()

    def used(self) -> frozenset[Copy]:
        """The copies of weights that plans in force use."""
        return self._copies([race.standing for race in self._races.values()])

    def wanted(self) -> frozenset[Copy]:
        """The same, and of plans that have not had their chance yet."""
        return self._copies([arm for race in self._races.values() for arm in race.wanted()])

    def _copies(self, arms: Sequence[Arm]) -> frozenset[Copy]:
        return frozenset[Copy]().union(*(self._planner.copies_of(arm.plan) for arm in arms))

    def gain(self, copies: frozenset[Copy], now: PlanConditions) -> float:
        """What is gained, of the time of usual passes, by more than these copies of weights."""
        with_all = without = 0.0
        for bucket, race in self._races.items():
            tokens, depth = self._planner.point(bucket, self.planned.ubatch, now)
            yard = weight_of(bucket, now) * self._yard.seconds(bucket, tokens, depth, False)[0]
            with_all += yard * exp(race.standing.mean)
            without += yard * exp(race.best(lambda plan: self._planner.copies_of(plan) <= copies).mean)
        return 1 - with_all / without if without else 0.0

    def prefer(self, copies: frozenset[Copy]) -> None:
        """Run by the best plans that need no other copies of weights than these."""
        self.remove(lambda plan: not self._planner.copies_of(plan) <= copies)

    def _run(self) -> None:
        """The next passes run by what was chosen."""
        now, plans = self._executor.plans, {b: race.now.plan for b, race in self._races.items()}
        if now.expected is self.planned.expected and all(plans[b] is p for b, p in now.plans.items()):
            return
        arms = [arm.plan for race in self._races.values() for arm in race.arms.values()]
        self._executor.adopt(replace(self.planned, plans=plans), arms)

    # --- threads

    def adopt_threads(self, seconds: Mapping[int, float]) -> str:
        """The same work took so long with each number of threads, in turn. The reason, if there are other
        threads now."""
        largest = self._races[BUCKETS[-1]]
        was = largest.standing.plan.threads
        self._threads.adopt(seconds, self.planned)
        self._crowd.settle()
        self._run()
        now = largest.standing.plan.threads
        return of_threads(now, was, seconds[now] / seconds[was], self._crowd.others) if now != was else ""

    # --- passes

    def observe(self, ran: PassTiming) -> None:
        """A pass ran: what it took counts for its plan, and for the forecast where nothing disturbed it."""
        race = self._races[ran.bucket]
        yard = self._yard.of_pass(ran.bucket, ran.tokens, ran.depth, ran.several)
        arm, at = race.now, perf_counter()
        self.usage.observe(ran.bucket, ran.tokens, ran.seconds, at)
        if race.observe(ran.seconds, yard, not ran.warm, at):
            for other in self._races.values():
                other.unsure = other.unsure or other is not race
            self._vary(race)
        if self._tells(arm):
            ran.learn()
        self._due.add(ran.bucket)
        self._crowd.observe_pass()

    def _tells(self, arm: Arm) -> bool:
        """Whether what just ran says what work takes where no other program computes."""
        if self._crowd.crowded or arm.off:
            return False
        return self._crowd.others is not None or arm.mean - arm.prior < JUMP or arm.runs > BELIEVED

    def look(self, at: float, rested: bool = False) -> Iterator[Change]:
        """Between two steps: decide what runs next, and say what has changed. `rested`: nothing may have run
        for long, and what others did meanwhile says nothing about now."""
        if self._crowd.look(at, rested):
            self._follow_crowd()
        if not self._due:
            return
        switched = [self._races[b].choose(at) for b in sorted(self._due)]
        self._due.clear()
        if any(switched) or self._verdicts:
            self._run()
        while self._verdicts:
            v = self._verdicts.pop(0)
            yield Change(at, self._conclude(v), "in force" if v.kept else "taken back")

    def _follow_crowd(self) -> None:
        """Other programs were looked at."""
        crowd = self._crowd
        if crowd.looks % RENEWED == 0:
            self._renew()
        for race in self._races.values():
            race.blind, race.crowded = crowd.others is None, crowd.crowded
        if not crowd.has_changed:
            return
        self._threads.forget()
        for race in self._races.values():
            self._vary(race)
            if crowd.others is not None and crowd.others < SPARE:
                race.quiet(ROUGH)
            else:
                race.crowd()
            self._due.add(race.bucket)

    def _vary(self, race: Race) -> None:
        self._threads.vary(race, self.planned)

    def _conclude(self, v: Verdict) -> str:
        """A plan's trial is over: other buckets learn from it; and why, in words."""
        race = self._races[v.bucket]
        if v.kept:
            self._vary(race)
            if same_places(v.plan, v.before):
                self._threads.spread(v, self.planned)
                self._run()
            else:
                self.planned = replace(self.planned, plans={**self.planned.plans, v.bucket: v.plan})
                self._recommend(v)
        return in_words(v, self._crowd.others)

    def _recommend(self, v: Verdict) -> None:
        """What has proved itself in one bucket may be good in others like it."""
        for other in self._races.values():
            if other.bucket != v.bucket and (other.bucket in FEW) == (v.bucket in FEW):
                self._offer(other, replace(v.plan, bucket=other.bucket), self.planned)
                other.hear_elsewhere(key_of(v.plan), log(v.ratio / v.expected))

    # --- predictions

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        """Seconds of a step: for each sequence its tokens, and how many come before them; None: unknown."""
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
        """Seconds of one pass, by what runs now on the machine as it is now."""
        race = self._races[self.planned.plan(tokens).bucket]
        yard, known = self._yard.seconds(race.bucket, tokens, depth, several)
        return yard * exp(race.now.mean) + self._executor.between_s if known or race.now.runs else None
