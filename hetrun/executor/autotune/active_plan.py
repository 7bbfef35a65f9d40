"""The plans in force: for each bucket the one that passes run by now, with as many threads as pay now.

The planner decides for a quiet machine; a bandit for each bucket (`planner/bandit.py`) decides which of its
plans, of earlier ones and of the fixed order runs the next pass, by what passes take.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, exp, log
from statistics import median
from time import perf_counter

from hetrun.executor.autotune.decisions import SPARE, TAKEN, in_words, of_threads, same_places
from hetrun.executor.autotune.state import Change
from hetrun.executor.autotune.tuned_model import TunedModel
from hetrun.executor.autotune.usage import PassUsage
from hetrun.executor.autotune.yardstick import Yardstick
from hetrun.executor.compiled_plan import Ran
from hetrun.planner.bandit import CERTAIN, EVENT, JUMP, PROVEN, ROUGH, Arm, Race, TrialBudget, Verdict
from hetrun.planner.online import Now, weight_of
from hetrun.planner.plan import BUCKETS, Placement, Plan, PlanSet, make_plans
from hetrun.planner.residency import Copy

LOOK_S = 0.5  # between two looks at what other programs do
SOON_S = 0.1  # the same where nothing is known of them but how it was a while ago
RENEWED = 4  # looks for which the yardstick is good: it takes half a millisecond to make
BELIEVED = 20  # passes that show how it is now, where it is unknown what other programs do
SURPRISE = 0.1  # a logarithm: so far off is a prediction that plans should not rest on any more
CLEARLY = 0.9  # of the time of the same work: another number of threads that takes less is surely faster
CLEARLY_BLIND = 0.6  # the same where it is unknown whether anything has changed: passes tell more
BLIND_S = 30.0  # how long the times of threads are believed, where it is unknown what other programs do
FEW = BUCKETS[:4]  # whose passes mostly wait for memory; in the others cores compute

Look = Callable[[float], float | None]  # how many cores others kept busy since it was called last


class InForce:
    """Puts plans into force and on trial, and knows what their passes take."""

    def __init__(self, model: TunedModel, look: Look, cores: int) -> None:
        executor = model.executor
        self.planned = executor.plans  # in force, with the threads that were planned
        self.budget, self.usage = TrialBudget(), PassUsage()
        self.others: float | None = None  # cores that other programs keep busy
        self.unsettled = False  # that has changed, or may have, and nothing has shown what that means
        self._planner, self._executor = model.planner, executor
        self._counts = tuple(model.setup.threads)  # that may be tried; with one there is nothing to choose
        self._look, self._cores = look, cores
        self._graph, self._alone = model.graph, dict[str, Mapping[str, Plan]]()
        self._fixed = executor.plans.plans  # the fixed order: always among what may run
        self._yard = Yardstick(model.planner, model.forecast, self._fixed)
        self._verdicts: list[Verdict] = []
        self._races = {
            b: Race(b, self.budget, self._verdicts.append, key_of(self._fixed[b])) for b in BUCKETS
        }
        self._by_threads: dict[int, float] = {}  # what the same work takes now, as logarithms
        self._due: set[str] = set()  # buckets in which a pass ran
        self._next_look, self._looks, self._reference = 0.0, 0, 0.0
        self._surveyed, self._begun = perf_counter(), False
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
                full = self._counts[-1]
                self._alone[name] = make_plans(self._graph, dict.fromkeys(BUCKETS, (full, placed)))
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
            self._recall_threads(race)

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

    def gain(self, copies: frozenset[Copy], now: Now) -> float:
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

    @property
    def crowded(self) -> bool:
        """Whether others take cores of ours, as far as we know."""
        return self.others is not None and self.others > TAKEN

    @property
    def quiet(self) -> bool:
        """Whether it is sure that no other program computes."""
        return self.others is not None and self.others <= TAKEN

    def tried(self, seconds: Mapping[int, float]) -> str:
        """The same work took so long with each number of threads, in turn: so do passes, about. The reason,
        if there are other threads now."""
        largest = self._races[BUCKETS[-1]]
        was = largest.standing.plan.threads
        fastest = min(seconds, key=lambda n: seconds[n])
        self._surveyed = perf_counter()
        self._by_threads = {n: log(took) for n, took in seconds.items()}
        clearly = CLEARLY if self.others is not None else CLEARLY_BLIND
        for race in self._races.values():
            places, before = places_of(race.standing.plan), race.standing.plan.threads
            if before not in seconds:
                continue
            self._vary(race)
            # Where it makes next to no difference, passes decide.
            best = fastest if seconds[fastest] < clearly * seconds[before] else before
            race.replace_standing((places, best), log(seconds[best] / seconds[before]))
            for n in seconds.keys() - {best}:
                ratio = log(seconds[n] / seconds[best])
                race.learn((places, n), race.standing, ratio, perf_counter())
        self.unsettled, self._begun = False, self._looks == 0
        self._run()
        now = largest.standing.plan.threads
        return of_threads(now, was, seconds[now] / seconds[was], self.others) if now != was else ""

    def _vary(self, race: Race) -> None:
        """The plan in force with other numbers of threads."""
        plan, seen = race.standing.plan, self._by_threads
        for threads in self._numbers():
            key = places_of(plan), threads
            if threads == plan.threads or key in race.arms:
                continue
            varied = replace(plan, threads=threads)
            fewer = threads < self.planned.plans[race.bucket].threads
            race.offer(key, varied, self._yard.prior(varied, self.planned), CERTAIN if fewer else ROUGH)
            if threads in seen and plan.threads in seen:
                race.learn(key, race.standing, seen[threads] - seen[plan.threads], perf_counter())

    def _numbers(self) -> set[int]:
        """Numbers of threads that may be worth a trial now."""
        if len(self._counts) < 2:
            return set()
        found = set(self._counts)
        if self.others is not None:
            found.add(max(1, min(self._counts[-1], self._cores - ceil(self.others - SPARE))))
        return found

    def _recall_threads(self, race: Race) -> None:
        """What the same work takes with more threads or fewer is known while others do what they did."""
        seen, standing = self._by_threads, race.standing
        for arm in race.arms.values():
            like = race.arms.get((places_of(arm.plan), standing.plan.threads))
            if arm.runs or like is None or arm is like:
                continue
            if arm.plan.threads in seen and standing.plan.threads in seen:
                ratio = seen[arm.plan.threads] - seen[standing.plan.threads]
                race.learn(arm.key, like, ratio, arm.at)

    def _follow(self, v: Verdict) -> None:
        """Other buckets take as many threads as have paid in one of them, until they know better."""
        self._by_threads |= {v.before.threads: 0.0, v.plan.threads: log(v.ratio)}
        for race in self._races.values():
            standing = race.standing
            if race.bucket == v.bucket or standing.plan.threads != v.before.threads:
                continue
            self._vary(race)
            key = places_of(standing.plan), v.plan.threads
            if key in race.arms:
                race.learn(key, standing, log(v.ratio), perf_counter())
                if not standing.runs:
                    race.put_in_force(key)
        self._run()

    # --- passes

    def observe(self, ran: Ran) -> None:
        """A pass ran: what it took counts for its plan, and for the forecast where nothing disturbed it."""
        race = self._races[ran.bucket]
        yard = self._yard.of_pass(ran.bucket, ran.tokens, ran.depth, ran.several)
        arm, at = race.now, perf_counter()
        self.usage.hear(ran.bucket, ran.tokens, ran.seconds, at)
        if race.observe(ran.seconds, yard, not ran.warm, at):
            for other in self._races.values():
                other.unsure = other.unsure or other is not race
            self._vary(race)
        if self._tells(arm):
            ran.learn()
        self._due.add(ran.bucket)
        self.unsettled = self.unsettled and self.others is None  # passes show what others do, but for that

    def _tells(self, arm: Arm) -> bool:
        """Whether what just ran says what work takes where no other program computes."""
        if self.crowded or arm.off:
            return False
        return self.others is not None or arm.mean - arm.prior < JUMP or arm.runs > BELIEVED

    def look(self, at: float, rested: bool = False) -> Iterator[Change]:
        """Between two steps: decide what runs next, and say what has changed. `rested`: nothing may have run
        for long, and what others did meanwhile says nothing about now."""
        if rested and self.others is not None and at > self._next_look + LOOK_S:
            self._look(at)
            self._next_look = at + SOON_S
        if at >= self._next_look:
            self._next_look = at + LOOK_S
            self._look_at_others(at)
        if not self._due:
            return
        switched = [self._races[b].choose(at) for b in sorted(self._due)]
        self._due.clear()
        if any(switched) or self._verdicts:
            self._run()
        while self._verdicts:
            v = self._verdicts.pop(0)
            yield Change(at, self._conclude(v), "in force" if v.kept else "taken back")

    def _look_at_others(self, at: float) -> None:
        self.others = self._look(at) if len(self._counts) > 1 else 0.0
        self._looks += 1
        if self._looks % RENEWED == 0:
            self._renew()
        for race in self._races.values():
            race.blind, race.crowded = self.others is None, self.crowded
        if self.others is None:
            self.unsettled = self.unsettled or at > self._surveyed + BLIND_S
            return
        if self._begun:  # threads were tried in the same crowd, a moment ago
            self._begun, self._reference = False, self.others
        if abs(self.others - self._reference) >= TAKEN:
            self._others_changed(self.others)

    def _others_changed(self, others: float) -> None:
        self._reference, self.unsettled = others, True
        self._by_threads.clear()
        for race in self._races.values():
            self._vary(race)
            if others < SPARE:
                race.quiet(ROUGH)
            else:
                race.crowd()
            self._due.add(race.bucket)

    def _conclude(self, v: Verdict) -> str:
        """A plan's trial is over: other buckets learn from it; and why, in words."""
        race = self._races[v.bucket]
        if v.kept:
            self._vary(race)
            if same_places(v.plan, v.before):
                self._follow(v)
            else:
                self.planned = replace(self.planned, plans={**self.planned.plans, v.bucket: v.plan})
                self._recommend(v)
        return in_words(v, self.others)

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


def places_of(plan: Plan) -> Hashable:
    """What runs where."""
    shares = tuple((p.scope, p.share) for p in plan.placements if p.share)
    return tuple(plan.places), shares


def key_of(plan: Plan) -> Hashable:
    """Plans with the same key are the same."""
    return places_of(plan), plan.threads
