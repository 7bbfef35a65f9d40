"""Plans in which two devices are busy at once: the engine's thread, and a backend that works by itself.

For each bucket the planner's own plan, in which backends take turns, is set against plans of two kinds:

- balanced: each layer's operations on one side or the other as TwinPilots does it (`balance.py`), where the
  other device has to bring weights over its link;
- shared out: rows of products, heads of attention or experts of a mixture on both sides, divided so that both
  end at the same time (`sharding.py`).

All are timed by one clock (`cost.py`) from what was measured, and corrected by what passes of such a plan
really took. One that is better by what any new plan must be better by takes the place of the other.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from hetrun.backend import Backend, Segment
from hetrun.errors import OptionError
from hetrun.graph import Graph
from hetrun.graph.ops import Moe
from hetrun.planner.costmodel import OpWork, WorkTimes
from hetrun.planner.online import (
    USUAL,
    WORTH,
    Likely,
    OnlinePlanner,
    Parts,
    PlanConditions,
    PlannerInputs,
    Proposal,
    weight_of,
)
from hetrun.planner.plan import (
    BUCKETS,
    ExpectedTimes,
    Placement,
    Plan,
    PlanSet,
    Stages,
    bucket_of,
    cut,
    make_plans,
)
from hetrun.planner.precision import PRICE
from hetrun.planner.residency import Copies, Copy
from hetrun.planner.trials import Trial
from hetrun.planner.two_device.candidates import CandidateSet, Pair, PlacementCandidate, scoring_of
from hetrun.planner.two_device.cost import DeviceTimes, PassSetting
from hetrun.planner.two_device.extra_weights import NO_PARTS, PartsHeld, PartsRoom
from hetrun.planner.two_device.hot_experts import ExpertDevice, HotExperts, PassSize
from hetrun.planner.two_device.kv_migration import KvMigration, steps_to_pay
from hetrun.planner.two_device.plan_choice import PlanChoice, is_concurrent, reason_of

log = logging.getLogger(__name__)

MOST_WRONG = 16.0  # times as long as predicted: no plan is that bad
CUTS_KEPT = 32


def _times(n: float, seconds: float | None) -> float | None:
    return None if seconds is None else n * seconds


class ConcurrentPlanner(OnlinePlanner):
    """The planner that measures, where a backend works by itself."""

    def __init__(
        self,
        graph: Graph,
        backends: Mapping[str, Backend],
        forecast: WorkTimes,
        inputs: PlannerInputs,
    ) -> None:
        super().__init__(graph, backends, forecast, inputs)
        self.sides = DeviceTimes(graph, backends, forecast, self.costs)
        self._backends = backends
        self._mixtures = {i for i, u in enumerate(self.units) if any(isinstance(o.attrs, Moe) for o in u.ops)}
        self._in_turn: dict[str, Plan] = {}  # what a bucket with two devices would run by otherwise
        self._wrong: dict[str, float] = {}  # bucket -> how many times as long as predicted passes took
        self._uses: dict[Copy, Parts] = {}
        self._held = PartsHeld(backends, self._alone, forecast)
        self._migration = KvMigration(forecast, len(self.sides.layers), self._alone)
        self.hot = HotExperts(self.sides, backends)

        # Most candidates were judged before, and cutting costs more than judging.
        @lru_cache(CUTS_KEPT)
        def cut_once(placements: tuple[Placement, ...]) -> Stages:
            return cut(graph, placements, self._alone)

        self._cut = cut_once

    def propose(self, current: PlanSet, now: PlanConditions) -> Proposal | None:
        self.sides.fresh()
        before = replace(current, plans={b: self._without(b, p) for b, p in current.plans.items()})
        proposal = super().propose(before, now)
        after = proposal.plans if proposal else before
        if self.hot:
            self._place_experts(current, after, now)
        room = self._room(after, now)
        chosen = {b: c for b in BUCKETS if (c := self._choose(b, current.plans[b], after, now, room))}
        chosen = self._within(chosen, current, after, now, room)
        plans = {b: chosen[b].plan if b in chosen else p for b, p in after.plans.items()}
        self._in_turn = {b: after.plans[b] for b in chosen}
        changed = [b for b in BUCKETS if plans[b] is not current.plans[b]]
        if not changed and not (proposal and proposal.drop):
            return None
        # What takes turns has its trial, too: two devices at once are harder to predict.
        used = self._copies_used(plans) | self._copies_used(after.plans)
        bring, drop = used - now.held, (proposal.drop if proposal else frozenset[Copy]()) - used
        whole = self._uses_of((now.held | bring) - drop)
        parts = frozenset(x for c in chosen.values() for x in self._held.needed(c.plan)) - whole
        reason = self._reason_of(current, chosen, changed, proposal.reason if proposal else "")
        billed = self._held.billed(after, parts)
        plan_set = self.annotate(replace(billed, plans=plans, reason=reason), now)
        must = bool(proposal and proposal.must)
        spare = now.parts - parts - whole
        return Proposal(plan_set, bring, drop, reason, parts, spare, must, self._in_turn)

    def _copies_used(self, plans: Mapping[str, Plan]) -> frozenset[Copy]:
        """Those of units that run as a whole."""
        return frozenset(
            (i, s.backend)
            for plan in plans.values()
            for s in plan.segments
            for i in self.costs.members(s)
            if not is_concurrent(plan) or self._whole(s, i)
        )

    def _whole(self, s: Segment, unit: int) -> bool:
        """Whether all ops of a unit are in a segment."""
        mine = {id(op) for op in s.ops}
        return all(id(op) in mine for op in self.units[unit].ops)

    def _reason_of(
        self, current: PlanSet, chosen: Mapping[str, PlanChoice], changed: Sequence[str], in_turn: str
    ) -> str:
        new = {b: chosen[b] for b in changed if b in chosen}
        left = [b for b in changed if b not in chosen and is_concurrent(current.plans[b])]
        return reason_of(new, left, in_turn if set(changed) - {*new, *left} else "")

    def _without(self, bucket: str, plan: Plan) -> Plan:
        """The plan that a bucket would have if devices took turns."""
        if not is_concurrent(plan):
            return plan
        if bucket not in self._in_turn:
            buckets = {bucket: (plan.threads, plan.placements[:1])}
            self._in_turn |= make_plans(self._graph, buckets, self._alone)
        return self._in_turn[bucket]

    def _choose(
        self, bucket: str, mine: Plan, after: PlanSet, now: PlanConditions, room: PartsRoom
    ) -> PlanChoice | None:
        """Two devices at once, as they are or in a new way; None if they had better take turns."""
        tokens, depth = self.point(bucket, after.ubatch, now)
        in_turn = self._seconds_in_turn(after.plans[bucket], tokens, depth)
        if in_turn is None:
            return None
        stay = self._clocked(bucket, mine, tokens, depth) if is_concurrent(mine) else in_turn
        could_stay = {s.backend for s in mine.segments} <= {*self.candidates} and self.hot.goes_with(mine)
        if stay is None or not could_stay:
            stay = in_turn
            mine = after.plans[bucket]
        limit = (1 - WORTH) * min(stay, in_turn)
        best: PlanChoice | None = None
        steps = steps_to_pay(in_turn)
        # The host has its part in each of them.
        n = min(tokens, self.host_ubatch or tokens)
        at = PassSetting(n, depth, self.threads[-1])
        for candidate in self._candidates(at, mine, after.plans[bucket], now, steps):
            if self._wrong.get(bucket, 1.0) * candidate.seconds * tokens / n >= limit:
                continue
            plan = self._made(bucket, at.threads, candidate)
            if plan is None or not self._held.fit(self._held.needed(plan) - room.whole, room):
                continue
            if (seconds := self._clocked(bucket, plan, tokens, depth)) is None:
                continue
            seconds += self._migration.seconds(mine, plan, now, steps)
            if self._rounds_more(plan, after.plans[bucket]):
                limit = min(limit, min(stay, in_turn) / (1 + PRICE))
            if seconds < min(limit, best.seconds if best else limit):
                best = PlanChoice(plan, seconds, min(stay, in_turn))
        if best is None and is_concurrent(mine) and in_turn >= (1 - WORTH) * stay:
            return PlanChoice(mine, stay, in_turn)
        return best

    def _rounds_more(self, plan: Plan, than: Plan) -> bool:
        """Whether results would be less close, and that matters."""

        def most(p: Plan) -> float:
            units = ((i, s.backend) for s in p.segments for i in self.costs.members(s))
            return max(self._rounding[i][b] for i, b in units)

        return self._precision == "exact" and most(plan) > most(than)

    def _seconds_in_turn(self, plan: Plan, tokens: int, depth: float) -> float | None:
        """As real passes showed; before there are any, not less than by the clock that judges the others."""
        n, times = self.cut_by(plan, tokens)
        at = PassSetting(n, depth, plan.threads)
        predicted = self.pass_seconds(plan, tokens, depth, at.several)
        if predicted is None or None not in [self.sides.measured(s, at) for s in plan.segments]:
            return predicted
        clocked = self.sides.clock(plan, replace(at, threads=self.threads[-1]))
        return max(predicted, times * clocked.seconds) if clocked else predicted

    def _clocked(self, bucket: str, plan: Plan, tokens: int, depth: float) -> float | None:
        n, times = self.cut_by(plan, tokens)
        found = self.sides.clock(plan, PassSetting(n, depth, plan.threads))
        return self._wrong.get(bucket, 1.0) * times * found.seconds if found else None

    def observe(self, bucket: str, factor: float) -> None:
        wrong = factor * self._wrong.get(bucket, 1.0)
        self._wrong[bucket] = min(max(wrong, 1 / MOST_WRONG), MOST_WRONG)

    def _made(self, bucket: str, threads: int, candidate: PlacementCandidate) -> Plan | None:
        try:
            stages = self._cut(candidate.placements)
        except OptionError as e:  # a border where weights cannot be cut
            log.debug("not shared out: %s", e)
            return None
        return Plan(bucket, threads, candidate.placements, stages)

    def _candidates(
        self, at: PassSetting, mine: Plan, in_turn: Plan, now: PlanConditions, steps: float
    ) -> Iterator[PlacementCandidate]:
        hosts = [b for b in self.candidates if b not in self._alone]
        others = [b for b in self.candidates if b in self._alone]
        scoring, there = scoring_of(mine), self._units_of(in_turn, self._alone)
        for host, other in product(hosts, others):
            pair = Pair(host, other, self._migration.layer_seconds(other, now, steps))
            staying = {unit: b for unit, b in there.items() if b != other}
            experts = self.hot.split(host, other, at)
            yield from CandidateSet(self.sides, pair, at, staying, experts).candidates(scoring)
            yield from self.hot.beside(in_turn, self._units_of(in_turn, [host]), host, at, experts)

    def _units_of(self, plan: Plan, backends: Collection[str]) -> dict[str, str]:
        """The units of a plan, in which backends take turns, that run on some of them."""
        mine = (s for s in plan.segments if s.backend in backends)
        return {self.units[i].scope: s.backend for s in mine for i in self.costs.members(s)}

    # --- memory

    def _copies(self, now: PlanConditions) -> Copies:
        copies = super()._copies(now)
        own_room = {b: max(0, n - self._held.own_bytes(now.parts, b)) for b, n in copies.own_room.items()}
        own = dict(copies.own_bytes)
        for b, room in own_room.items():
            mixtures = [c for c in own if c[1] == b and c[0] in self._mixtures and c not in now.held]
            # Where not all have room, some experts of each are worth more than some mixtures as a whole.
            if sum(own[c] for c in mixtures) > room:
                own |= dict.fromkeys(mixtures, room + 1)
        return replace(copies, own_bytes=own, own_room=own_room)

    def _place_experts(self, current: PlanSet, after: PlanSet, now: PlanConditions) -> None:
        """Decide which experts lie on which device, in what room whole units leave."""
        coming = self._copies_used(after.plans) | now.held
        points = [
            PassSize(PassSetting(*self.point(b, after.ubatch, now), self.threads[-1]), weight_of(b, now))
            for b in BUCKETS
        ]
        homes = {b: [i for i in self._mixtures if (i, b) in now.home] for _, b in now.home}
        host = max(homes, key=lambda b: len(homes[b]))
        scopes = frozenset(op.scope for i in homes[host] for op in self.units[i].ops)
        for b in [b for b in self.candidates if b in self._alone and host not in self._alone]:
            free = now.own_room.get(b, 1 << 60) - self.sizes.claimed(coming, b)
            free -= self._held.own_bytes(now.parts, b)
            device = ExpertDevice(host, b, free, scopes)
            self.hot.choose(device, points, current.plans.values(), fixed=not now.eager)

    def _room(self, after: PlanSet, now: PlanConditions) -> PartsRoom:
        """What there is for parts, beside the copies that the plans bring in which take turns."""
        copies = self._copies(now)
        coming = self._copies_used(after.plans) - now.held
        own = {b: n - copies.own_total(coming, b) for b, n in copies.own_room.items()}
        own = {b: max(0, n - self.hot.kept_free.get(b, 0)) for b, n in own.items()}
        return PartsRoom(
            copies.room - copies.total(now.held), own, self._uses_of(now.held | coming), now.parts
        )

    def _within(
        self,
        chosen: Mapping[str, PlanChoice],
        current: PlanSet,
        after: PlanSet,
        now: PlanConditions,
        room: PartsRoom,
    ) -> dict[str, PlanChoice]:
        """Of the plans with two devices those that fit into memory together and are worth what they need;
        what stays comes first, then what gains most. Where there is no room for one, there may be for
        another that needs less besides."""
        kept, parts = dict[str, PlanChoice](), NO_PARTS

        def rank(bucket: str) -> tuple[bool, float]:
            c = chosen[bucket]
            return c.plan is not current.plans[bucket], USUAL[bucket] * (c.seconds - c.otherwise)

        for bucket in sorted(chosen, key=rank):
            choice: PlanChoice | None = chosen[bucket]
            if not self._held.fit(parts | self._more(choice, room), room):
                left = self._held.room_beside(room, parts)
                choice = self._choose(bucket, current.plans[bucket], after, now, left)
            more = parts | self._more(choice, room)
            if not choice or not self._held.fit(more, room):
                continue
            if self._is_worth(more - parts - now.parts, choice, after, now):
                kept[bucket], parts = choice, more
        return kept

    def _more(self, choice: PlanChoice | None, room: PartsRoom) -> Parts:
        """What a plan needs besides whole units."""
        return self._held.needed(choice.plan) - room.whole if choice else NO_PARTS

    def _is_worth(self, missing: Parts, choice: PlanChoice, after: PlanSet, now: PlanConditions) -> bool:
        """The rule of the planner: in the long run, or for the prompt that waits."""
        if not missing or now.eager:
            return True
        price = self._price_of({b: self._held.moved(missing, b) for b in {b for b, _ in missing}}, now)
        of_prompts = choice.plan.bucket == bucket_of(after.ubatch)
        gain = choice.otherwise - choice.seconds if of_prompts else 0.0
        return now.waiting / after.ubatch * gain > price

    def _uses_of(self, held: frozenset[Copy]) -> Parts:
        found: Parts = frozenset()
        for unit, b in held:
            if (unit, b) not in self._uses:
                uses = self._backends[b].wants(self.units[unit].ops)
                self._uses[unit, b] = frozenset((b, use) for use in uses)
            found |= self._uses[unit, b]
        return found

    # --- what the autotuner asks

    def annotate(self, plans: PlanSet, now: PlanConditions) -> PlanSet:
        found = super().annotate(plans, now)
        expected = dict(found.expected)
        for bucket, plan in plans.plans.items():
            if not is_concurrent(plan):
                continue
            tokens, depth = self.point(bucket, plans.ubatch, now)
            n, passes = self.cut_by(plan, tokens)
            at = PassSetting(n, depth, plan.threads)
            clocked, wrong = self.sides.clock(plan, at), passes * self._wrong.get(bucket, 1.0)
            times = {
                s.name: (wrong * clocked.segments[s.name], _times(passes, self.sides.measured(s, at)))
                for s in plan.segments
                if clocked
            }
            expected[bucket] = ExpectedTimes(tokens, depth, times)
        return replace(found, expected=expected)

    def needs_parts(self, plan: Plan) -> bool:
        return is_concurrent(plan)

    def believed_seconds(self, plan: Plan, tokens: int, depth: float, several: bool) -> float | None:
        if is_concurrent(plan):
            return self.pass_seconds(plan, tokens, depth, several)
        return super().believed_seconds(plan, tokens, depth, several)

    def pass_seconds(self, plan: Plan, tokens: int, depth: float, several: bool = False) -> float | None:
        if not is_concurrent(plan):
            return super().pass_seconds(plan, tokens, depth, several)
        return self._clocked(plan.bucket, plan, tokens, depth)

    def more_trials(self, backend: str, context: int, ubatch: int) -> list[Trial]:
        return self.sides.trials(backend, self.threads[-1], context, ubatch)

    def other_trials(self, plan: Plan, depth: float) -> list[Trial]:
        return self.sides.elsewhere(plan, depth) if is_concurrent(plan) else []

    def rests_on(self, plan: Plan, tokens: int) -> Mapping[OpWork, bool]:
        return self.sides.works(plan, tokens) if is_concurrent(plan) else {}

    def listen(self, likely: Likely) -> None:
        self.sides.likely = likely

    def surprised(self) -> str:
        return self.hot.surprised()
