"""Plans in force with more threads or fewer: what that would make of the time of their passes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import ceil, log
from time import perf_counter

from hetrun.executor.autotune.crowd_watch import CrowdWatch
from hetrun.executor.autotune.decisions import SPARE
from hetrun.executor.autotune.yardstick import Yardstick
from hetrun.planner.bandit import CERTAIN, ROUGH, Race, Verdict
from hetrun.planner.plan import Plan, PlanSet

CLEARLY = 0.9  # of the time of the same work: another number of threads that takes less is surely faster
CLEARLY_BLIND = 0.6  # the same where it is unknown whether anything has changed: passes tell more


class ThreadTrials:
    """Offers them to the races of their buckets, with what is known of them."""

    def __init__(
        self,
        counts: Sequence[int],
        cores: int,
        races: Mapping[str, Race],
        yardstick: Yardstick,
        crowd: CrowdWatch,
    ) -> None:
        """`counts`: the numbers that may be tried, ascending; with one there is nothing to choose."""
        self._counts, self._cores = tuple(counts), cores
        self._races, self._yardstick, self._crowd = races, yardstick, crowd
        self._by_threads: dict[int, float] = {}  # what the same work takes now, as logarithms

    def forget(self) -> None:
        """Other programs take more or less than they did: what threads took then says nothing now."""
        self._by_threads.clear()

    def adopt(self, seconds: Mapping[int, float], planned: PlanSet) -> None:
        """The same work took so long with each number of threads, in turn: so do passes, about. The best of
        them is in force afterwards."""
        fastest = min(seconds, key=lambda n: seconds[n])
        self._by_threads = {n: log(took) for n, took in seconds.items()}
        clearly = CLEARLY if self._crowd.others is not None else CLEARLY_BLIND
        for race in self._races.values():
            places, before = places_of(race.standing.plan), race.standing.plan.threads
            if before not in seconds:
                continue
            self.vary(race, planned)
            # Where it makes next to no difference, passes decide.
            best = fastest if seconds[fastest] < clearly * seconds[before] else before
            race.replace_standing((places, best), log(seconds[best] / seconds[before]))
            for n in seconds.keys() - {best}:
                ratio = log(seconds[n] / seconds[best])
                race.learn((places, n), race.standing, ratio, perf_counter())

    def vary(self, race: Race, planned: PlanSet) -> None:
        """Offer the plan in force with other numbers of threads."""
        plan, seen = race.standing.plan, self._by_threads
        for threads in self._numbers():
            key = places_of(plan), threads
            if threads == plan.threads or key in race.arms:
                continue
            varied = replace(plan, threads=threads)
            fewer = threads < planned.plans[race.bucket].threads
            race.offer(key, varied, self._yardstick.prior(varied, planned), CERTAIN if fewer else ROUGH)
            if threads in seen and plan.threads in seen:
                race.learn(key, race.standing, seen[threads] - seen[plan.threads], perf_counter())

    def _numbers(self) -> set[int]:
        """Numbers of threads that may be worth a trial now."""
        if len(self._counts) < 2:
            return set()
        found = set(self._counts)
        if (others := self._crowd.others) is not None:
            found.add(max(1, min(self._counts[-1], self._cores - ceil(others - SPARE))))
        return found

    def recall(self, race: Race) -> None:
        """What the same work takes with more threads or fewer is known while others do what they did."""
        seen, standing = self._by_threads, race.standing
        for arm in race.arms.values():
            like = race.arms.get((places_of(arm.plan), standing.plan.threads))
            if arm.runs or like is None or arm is like:
                continue
            if arm.plan.threads in seen and standing.plan.threads in seen:
                ratio = seen[arm.plan.threads] - seen[standing.plan.threads]
                race.learn(arm.key, like, ratio, arm.at)

    def spread(self, v: Verdict, planned: PlanSet) -> None:
        """Other buckets take as many threads as have paid in one of them, until they know better."""
        self._by_threads |= {v.before.threads: 0.0, v.plan.threads: log(v.ratio)}
        for race in self._races.values():
            standing = race.standing
            if race.bucket == v.bucket or standing.plan.threads != v.before.threads:
                continue
            self.vary(race, planned)
            key = places_of(standing.plan), v.plan.threads
            if key in race.arms:
                race.learn(key, standing, log(v.ratio), perf_counter())
                if not standing.runs:
                    race.put_in_force(key)


def places_of(plan: Plan) -> Hashable:
    """What runs where."""
    shares = tuple((p.scope, p.share) for p in plan.placements if p.share)
    return tuple(plan.places), shares


def key_of(plan: Plan) -> Hashable:
    """Plans with the same key are the same."""
    return places_of(plan), plan.threads
