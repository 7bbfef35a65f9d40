"""The planner that measures: for each bucket the backends and threads that take least time here and now.

It knows times only from the forecast, which is fed by a probe at first use and by every step since. It is
asked again while the model runs, and answers with a new plan set where that pays for its price.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from hetrun.backend import FLOAT_BYTES, Backend, Floats, OwnMemory, Precision, Segment, WeightUse
from hetrun.errors import BudgetError
from hetrun.graph import Graph
from hetrun.graph.signature import units
from hetrun.planner.costmodel import OpWork, WorkTimes
from hetrun.planner.plan import (
    BUCKETS,
    ExpectedTimes,
    Placement,
    Plan,
    PlanSet,
    bucket_of,
    crossing_width,
    make_plans,
    most_on_host,
)
from hetrun.planner.precision import closer
from hetrun.planner.residency import (
    BucketDemand,
    BucketPlacement,
    Copies,
    Copy,
    complete,
    cost,
    place_all,
    used_by,
)
from hetrun.planner.segment_cost import SegmentCosts, longest
from hetrun.planner.shortest_path import Chain
from hetrun.planner.switch_cost import turn
from hetrun.planner.trials import LINK, SMALL, TOKENS, Trial
from hetrun.planner.weight_sizes import RowBytes, rows_of, sizes_of
from hetrun.system.units import counted

log = logging.getLogger(__name__)

START, RATE, HOLDS = "start_s", "upload_bytes_s", "overhead_bytes"  # facts of a backend
BRING = 0.04  # what further copies of weights must gain to be brought in; they stay while they gain WORTH
WORTH = 0.03  # a new plan must be better by so much, or the same two would take turns
REMEMBERED = 1.25  # how wrong a backend that does not run now is believed to be: it may have changed
# Of a pass. Units are measured one by one, and find more of their weights in caches than a pass leaves there:
# no two times are known so well that backends take turns for less.
DOUBT = 0.01
# Passes of each bucket in a conversation of which nothing is known: an answer after a prompt of some length.
USUAL = {
    "1": 128.0,
    "2-4": 2.0,
    "5-8": 2.0,
    "9-16": 2.0,
    "17-32": 2.0,
    "33-64": 2.0,
    "65-256": 2.0,
    "257-512": 4.0,
    "513+": 1.0,
}
MIDDLE = {"1": 1, "2-4": 3, "5-8": 8, "9-16": 16, "17-32": 24, "33-64": 48, "65-256": 192, "257-512": 512}
SHALLOW = 512.0

Likely = Callable[[str], Floats | None]  # by router: how likely a token chooses each expert
Parts = frozenset[tuple[str, WeightUse]]  # a backend, and a weight in the form it wants for some ops


@dataclass(frozen=True, slots=True)
class PlanConditions:
    """What a plan must suit."""

    room: int  # bytes for weights, and for what backends hold besides
    home: frozenset[Copy]  # where each unit was from the beginning
    held: frozenset[Copy]  # the weights that are in memory
    started: frozenset[str]  # backends whose libraries are loaded
    depth: Mapping[str, float]  # bucket -> tokens that a token has recently seen
    passes: Mapping[str, float]  # bucket -> recent passes
    waiting: int = 0  # tokens of prompts that wait
    eager: bool = False  # whatever pays in the long run is brought in now
    parts: Parts = frozenset()  # weights that are in memory besides those of whole units
    kv_bytes: int = 0  # keys and values that are in use
    own_room: Mapping[str, int] = field(default_factory=dict)  # for weights, in devices' own memory
    # Bucket -> tokens of the last minutes, if what would have paid for them is brought in now.
    ran: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A better plan, what has to be brought in for it, and why."""

    plans: PlanSet
    bring: frozenset[Copy]
    drop: frozenset[Copy]
    reason: str
    parts: Parts = frozenset()  # what it needs besides the weights of whole units
    spare: Parts = frozenset()  # those of them that are not needed any more
    must: bool = False  # the plan before cannot stay
    also: Mapping[str, Plan] = field(default_factory=dict)  # by bucket: what is worth a trial as well


@dataclass(frozen=True, slots=True)
class PlannerInputs:
    """What a planner may choose from, and what it must leave room for."""

    threads: tuple[int, ...]  # ascending
    candidates: tuple[str, ...]  # backends that may be chosen
    precision: Precision = "exact"
    wide: tuple[int, ...] = ()  # of them those that may be best where memory is not the limit; else the most
    host_ubatch: int = 0  # the most tokens of passes in which the host computes, if devices take more
    own: Mapping[str, OwnMemory] = field(default_factory=dict)  # what devices may take of their own memory
    rows: RowBytes = lambda ops: 0  # of the keys and values of a text of the usual length


class OnlinePlanner:
    """Plans one graph on one machine, again and again."""

    def __init__(
        self,
        graph: Graph,
        backends: Mapping[str, Backend],
        forecast: WorkTimes,
        inputs: PlannerInputs,
    ) -> None:
        self.units = units(graph)
        self.costs = SegmentCosts(self.units, backends, forecast, inputs.threads)
        self._graph = graph
        self._forecast = forecast
        self.threads = inputs.threads
        self.wide = inputs.wide or self.threads[-1:]
        self._ran: dict[str, dict[str, tuple[Segment, int]]] = {}  # bucket -> backend -> its longest, threads
        self.candidates = inputs.candidates
        sizes = sizes_of(self.units, {b: backends[b] for b in self.candidates}, self.costs.able)
        self.sizes = replace(sizes, rows=rows_of(self.units, sizes.own, inputs.own, inputs.rows))
        self._rounding = tuple(
            {name: max(map(backend.rounding, unit.ops)) for name, backend in backends.items()}
            for unit in self.units
        )
        self._precision = inputs.precision
        self._alone = [name for name, backend in backends.items() if backend.asynchronous]
        self.host_ubatch = inputs.host_ubatch
        # Units that do no more on a host in passes of many tokens than a plan `on_devices` may.
        self._looks_up = tuple(
            all(op.out.rows != "tokens" or op.kind == "embed" for op in unit.ops) for unit in self.units
        )

    @property
    def nbytes(self) -> Mapping[Copy, int]:
        """What each unit takes of the host's memory on each backend that could hold it."""
        return self.sizes.host

    def propose(self, current: PlanSet, now: PlanConditions) -> Proposal | None:
        """A plan set that is better than the current one, or None."""
        self.costs.fresh()
        factors = self._factors(current, now)
        demands = self._demands(current, now, factors)
        if not all(all(chain.times) for d in demands for chain in d.ways.values()):
            return None  # something was never measured: the current plan stays
        before = [self._as_placed(current, bucket, d) for bucket, d in zip(BUCKETS, demands, strict=True)]
        if not complete(demands, now.held):
            return None  # something that is in memory was never measured
        kept = wanted = self._place(demands, now, now.held)
        # What should be brought in is asked only where it may be: it can take a second to find out.
        if now.eager or now.waiting or now.ran or self._must(before, now):
            wanted = self._afresh(demands, now, kept)
            if not self._pays(demands, kept, wanted, current.ubatch, now):
                wanted = kept
        old, new = cost(demands, before), cost(demands, wanted)
        if old - new < WORTH * old and not self._must(before, now):
            return None
        plans = self._plan_set(current, before, demands, wanted, now)
        used = used_by(wanted)
        drop = now.held - used - now.home if self._tight(used | now.held, now) else frozenset()
        reason = self._reason(before, wanted, demands)
        must = self._must(before, now)
        return Proposal(replace(plans, reason=reason), used - now.held, drop, reason, must=must)

    def annotate(self, plans: PlanSet, now: PlanConditions) -> PlanSet:
        """The same plans with what they are predicted to take."""
        times = {}
        for bucket, plan in plans.plans.items():
            tokens, depth = self.point(bucket, plans.ubatch, now)
            n, passes = self.cut_by(plan, tokens)
            found = {}
            for s in plan.segments:
                predicted = self.costs.predicted(s, plan.threads, n, depth)
                if predicted is not None:
                    measured = self.costs.measured(s, plan.threads, n, depth)
                    found[s.name] = passes * predicted, measured and passes * measured
            times[bucket] = ExpectedTimes(tokens, depth, found)
        return replace(plans, expected=times)

    # --- what the autotuner asks; a planner for two devices knows more

    def cut_by(self, plan: Plan, tokens: int) -> tuple[int, float]:
        """The passes that `tokens` tokens become, which might be one: tokens of each, and how many passes."""
        most = most_on_host(plan, self.host_ubatch)
        return (most, tokens / most) if 0 < most < tokens else (tokens, 1.0)

    def pass_seconds(self, plan: Plan, tokens: int, depth: float, several: bool = False) -> float | None:
        """What the segments of a pass take, or of the passes that the host makes of it."""
        return self._summed(plan, tokens, depth, several=several, believed=inf)

    def believed_seconds(self, plan: Plan, tokens: int, depth: float, several: bool) -> float | None:
        """The same of a plan that does not run: what runs of its segments took may be long ago."""
        return self._summed(plan, tokens, depth, several=several, believed=REMEMBERED)

    def _summed(
        self, plan: Plan, tokens: int, depth: float, *, several: bool, believed: float
    ) -> float | None:
        """The segments of a pass; what runs of them took corrects them by a factor of at most `believed`."""
        n, times = self.cut_by(plan, tokens)
        found = [self.costs.predicted(s, plan.threads, n, depth, several, believed) for s in plan.segments]
        return None if None in found else times * sum(seconds for seconds in found if seconds)

    def more_trials(self, backend: str, context: int, ubatch: int) -> list[Trial]:
        """What to measure besides units."""
        return []

    def other_trials(self, plan: Plan, depth: float) -> list[Trial]:
        """What of a plan could be tried elsewhere besides units."""
        return []

    def rests_on(self, plan: Plan, tokens: int) -> Mapping[OpWork, bool]:
        """Times besides those of units and segments that a plan rests on, and whether it uses what they are
        of."""
        return {}

    def listen(self, likely: Likely) -> None:
        """Hear from there how likely tokens choose each expert of a mixture, by its router."""

    def surprised(self) -> str:
        """Whether models are used in another way than the plans were made for; empty if not."""
        return ""

    def observe(self, bucket: str, factor: float) -> None:
        """Passes of plans that `needs_parts` took `factor` times as long as was predicted."""

    # --- what it would take

    def point(self, bucket: str, ubatch: int, now: PlanConditions) -> tuple[int, float]:
        """A typical pass of a bucket: tokens, and how many each of them sees."""
        tokens = min(MIDDLE.get(bucket, ubatch), ubatch)
        return tokens, now.depth.get(bucket, max(SHALLOW, tokens / 2) if tokens < 64 else tokens / 2)

    def _factors(self, current: PlanSet, now: PlanConditions) -> dict[str, dict[str, float]]:
        """How wrong the sum of units is for each bucket and backend, as real runs showed.

        What ran before is believed to be as wrong as it was then. Otherwise whatever does not run would look
        better than what does, because trials are the best of some runs, and two backends would take turns.
        """
        found = {}
        for bucket, plan in current.plans.items():
            tokens, depth = self.point(bucket, current.ubatch, now)
            ran = self._ran.setdefault(bucket, {})
            ran |= {b: (s, plan.threads) for b, s in longest(plan.segments).items()}
            found[bucket] = {
                b: self.costs.correction(s, OpWork(self.costs.form(s), b, threads), tokens, depth)
                for b, (s, threads) in ran.items()
            }
            for b in ran.keys() - {s.backend for s in plan.segments}:
                found[bucket][b] = min(max(found[bucket][b], 1 / REMEMBERED), REMEMBERED)
        return found

    def _demands(
        self, current: PlanSet, now: PlanConditions, factors: Mapping[str, Mapping[str, float]]
    ) -> list[BucketDemand]:
        demands = []
        for bucket in BUCKETS:
            tokens, depth = self.point(bucket, current.ubatch, now)
            ways = self._ways(tokens, depth, factors[bucket])
            # A bucket that no pass falls into has no say.
            weight = weight_of(bucket, now) if _is_reached(bucket, current.ubatch) else 0.0
            demands.append(BucketDemand(weight, ways))
        return demands

    def _ways(self, tokens: int, depth: float, factors: Mapping[str, float]) -> dict[int, Chain]:
        """How units run in passes of `tokens` tokens. Where the host computes at most some of them at once, a
        part of each weight crosses for each of its passes; devices alone take all tokens at once."""
        most = self.host_ubatch or tokens
        n, times = min(tokens, most), max(1.0, tokens / most)
        ways = {}
        # Fewer threads win where memory is the limit: larger passes are not measured with them.
        counts = self.threads if tokens <= SMALL else self.wide
        known = [n for n in counts if self.costs.knows(n)] or [n for n in self.threads if self.costs.knows(n)]
        for threads in known or counts:
            chain = self.costs.chain(self.candidates, threads, n, depth)
            if all(chain.times):
                chain = self.costs.scaled(chain, {b: times * factors.get(b, 1.0) for b in self.candidates})
                ways[threads] = chain.taking_turns(self._turn(chain, n))
        if times > 1 and (alone := self._by_devices(tokens, depth, factors)):
            ways[-self.threads[-1]] = alone
        return ways or {self.threads[-1]: chain}

    def _by_devices(self, tokens: int, depth: float, factors: Mapping[str, float]) -> Chain | None:
        """All that grows with the tokens of a pass on backends that work by themselves; None where that
        cannot be. What one of them leaves to another comes to the host, so few changes are worth it."""
        chain = self.costs.chain(self.candidates, self.threads[-1], tokens, depth)
        devices, every = frozenset(self._alone), frozenset(self.candidates)
        chain = chain.only([every if looks_up else devices for looks_up in self._looks_up])
        if not all(chain.times):
            return None
        chain = self.costs.scaled(chain, factors)
        rates = [rate for b in self._alone if (rate := self._forecast.fact(LINK, b))]
        crossing = FLOAT_BYTES * tokens * crossing_width(self._graph) / min(rates) if rates else 0.0
        return chain.taking_turns(max(self._turn(chain, tokens), crossing))

    def _turn(self, chain: Chain, tokens: int) -> float:
        """What it costs that backends take turns once."""
        known = [self._forecast.fact(turn(tokens), b) or 0.0 for b in self.candidates]
        return max([DOUBT * sum(min(times.values()) for times in chain.times), *known])

    def _copies(self, now: PlanConditions) -> Copies:
        """What copies take besides the home of every unit, which stays."""
        at_home = {b for _, b in now.home}
        fixed = {b: int(self._forecast.fact(HOLDS, b) or 0) for b in self.candidates if b not in at_home}
        sizes, room = self.sizes, max(0, now.room - sum(self.nbytes[c] for c in now.home))
        host = {c: 0 if c in now.home else size for c, size in sizes.host.items()}
        # A device gets what comes before it gives up what goes: all that it holds counts as what stays.
        own = {c: 0 if c in now.held else sizes.claim(c) for c in sizes.own}
        own_room = {b: max(0, n - sizes.claimed(now.held, b)) for b, n in now.own_room.items()}
        return Copies(host, fixed, room, own, own_room)

    def _place(
        self, demands: Sequence[BucketDemand], now: PlanConditions, held: frozenset[Copy] | None
    ) -> list[BucketPlacement]:
        """The best placements: on the copies that are held, or on whatever fits."""
        copies = self._copies(now)
        if held is not None:
            allowed = [
                frozenset(b for b in self.candidates if (i, b) in held) for i in range(len(self.units))
            ]
            demands = [replace(d, ways={t: c.only(allowed) for t, c in d.ways.items()}) for d in demands]
            copies = replace(copies, room=1 << 62, own_room={})
        placed = place_all(demands, copies)
        return closer(demands, placed, copies, self._rounding) if self._precision == "exact" else placed

    def _afresh(
        self, demands: Sequence[BucketDemand], now: PlanConditions, kept: list[BucketPlacement]
    ) -> list[BucketPlacement]:
        """The best placements on whatever fits; those that are kept where none was found in time."""
        try:
            return self._place(demands, now, None)
        except BudgetError as e:
            log.debug("no other placement was found: %s", e)
            return kept

    def _as_placed(self, current: PlanSet, bucket: str, demand: BucketDemand) -> BucketPlacement:
        """The current plan in the same terms."""
        plan = current.plans[bucket]
        backends = [""] * len(self.units)
        for s in plan.segments:
            for i in self.costs.members(s):
                backends[i] = s.backend
        way = -self.threads[-1] if plan.on_devices and -self.threads[-1] in demand.ways else plan.threads
        chain = demand.ways.get(way) or next(iter(demand.ways.values()))
        known = all(b in times for b, times in zip(backends, chain.times, strict=True))
        return BucketPlacement(way, tuple(backends), chain.seconds(backends) if known else float("inf"))

    def _pays(
        self,
        demands: Sequence[BucketDemand],
        kept: Sequence[BucketPlacement],
        wanted: Sequence[BucketPlacement],
        ubatch: int,
        now: PlanConditions,
    ) -> bool:
        """Whether what has to be brought in for the better plan is worth its price."""
        missing = used_by(wanted) - now.held
        if not missing:
            return True
        if now.eager:
            return cost(demands, wanted) < (1 - BRING) * cost(demands, kept)
        price = self.price(missing, now)
        if now.ran:
            return self._has_lost(price, kept, wanted, ubatch, now)
        # A long prompt runs in passes of the largest bucket.
        largest = BUCKETS.index(bucket_of(ubatch))
        return now.waiting / ubatch * (kept[largest].seconds - wanted[largest].seconds) > price

    def _has_lost(
        self,
        price: float,
        kept: Sequence[BucketPlacement],
        wanted: Sequence[BucketPlacement],
        ubatch: int,
        now: PlanConditions,
    ) -> bool:
        """Whether passes of the last minutes have lost as much without copies as these cost. To wait for that
        costs at most twice what the best choice in hindsight would have cost (a ski rental)."""
        lost = total = 0.0
        for bucket, old, new in zip(BUCKETS, kept, wanted, strict=True):
            passes = now.ran.get(bucket, 0.0) / self.point(bucket, ubatch, now)[0]
            lost += passes * (old.seconds - new.seconds)
            total += passes * old.seconds
        return lost > max(price, BRING * total)

    def needs_parts(self, plan: Plan) -> bool:
        """Whether a plan needs more than the weights of whole units."""
        return False

    def copies_of(self, plan: Plan) -> frozenset[Copy]:
        """The copies of whole units that a plan needs."""
        return frozenset((i, s.backend) for s in plan.segments for i in self.costs.members(s))

    def price(self, missing: frozenset[Copy], now: PlanConditions) -> float:
        """Seconds until these copies are there."""
        backends = sorted({b for _, b in missing})
        return self._price_of({b: self.sizes.moved(c for c in missing if c[1] == b) for b in backends}, now)

    def _price_of(self, nbytes: Mapping[str, int], now: PlanConditions) -> float:
        """Seconds until these numbers of bytes have come to each backend, which may have to begin before."""
        total = 0.0
        for b, size in nbytes.items():
            total += 0.0 if b in now.started else self._forecast.fact(START, b) or 0.0
            rate = self._forecast.fact(RATE, b)
            total += size / rate if rate else 0.0
        return total

    def _must(self, before: Sequence[BucketPlacement], now: PlanConditions) -> bool:
        """The current plan cannot stay: it needs what memory does not hold any more."""
        return not used_by(before) <= now.held or self._tight(now.held, now)

    def _tight(self, held: frozenset[Copy], now: PlanConditions) -> bool:
        copies = self._copies(now)
        return copies.total(held) > copies.room

    # --- what comes out

    def _plan_set(
        self,
        current: PlanSet,
        before: Sequence[BucketPlacement],
        demands: Sequence[BucketDemand],
        placed: Sequence[BucketPlacement],
        now: PlanConditions,
    ) -> PlanSet:
        """New plans where something changes; a bucket that stays keeps its plan, and what was compiled."""
        plans, moved = dict(current.plans), dict[str, tuple[int, tuple[Placement, ...]]]()
        for bucket, old, demand, p in zip(BUCKETS, before, demands, placed, strict=True):
            if old.backends != p.backends:
                moved[bucket] = p.threads, self._placements(demand, p)
            elif old.threads != p.threads:
                plans[bucket] = replace(plans[bucket], threads=p.threads)
        plans |= make_plans(self._graph, moved, self._alone)
        brought = (now.held | used_by(placed)) - now.home
        billed = self.sizes.billed(current, brought, self._copies(now).fixed)
        return self.annotate(replace(billed, plans=plans), now)

    def _placements(self, demand: BucketDemand, placed: BucketPlacement) -> tuple[Placement, ...]:
        """One for everything, and one for each unit that runs elsewhere."""
        chain = demand.ways[placed.way]
        main = Counter(placed.backends).most_common(1)[0][0]
        found = [Placement("", main, self._why_all(chain.times, placed, main))]
        for i, (unit, backend) in enumerate(zip(self.units, placed.backends, strict=True)):
            if backend != main:
                here, there = chain.times[i][backend], chain.times[i].get(main)
                than = f", {ms(there)} on {main}" if there is not None else f"; {main} was not measured"
                than = than if main in self.costs.able[i] else f"; {main} cannot"
                found.append(Placement(unit.scope, backend, f"{ms(here)}{than}"))
        return tuple(found)

    def _why_all(self, times: Sequence[Mapping[str, float]], placed: BucketPlacement, main: str) -> str:
        others = {b for t in times for b in t} - {main}
        alone = {b: sum(t[b] for t in times) for b in others if all(b in t for t in times)}
        why = f"{ms(placed.seconds)} a pass"
        if placed.given:
            why += f", {ms(placed.given)} of them for closer results"
        if not alone:
            return f"{why}; no other backend can run all of it, or was measured"
        backend = min(alone, key=lambda b: alone[b])
        return f"{why}, {ms(alone[backend])} on {backend}"

    def _reason(
        self,
        before: Sequence[BucketPlacement],
        after: Sequence[BucketPlacement],
        demands: Sequence[BucketDemand],
    ) -> str:
        """What changes most, and what it brings."""
        changes = []
        for bucket, a, b, d in zip(BUCKETS, before, after, demands, strict=True):
            if d.weight and (a.threads, a.backends) != (b.threads, b.backends):
                changes.append((d.weight * (a.seconds - b.seconds), bucket, a, b))
        if not changes:
            return "memory"
        changes.sort(key=lambda c: -c[0])
        _, bucket, a, b = changes[0]
        more = len(changes) - 1
        if a.backends == b.backends:
            what = f"{counted(b.threads, 'thread')} instead of {a.threads}"
        else:
            moved = Counter(y for x, y in zip(a.backends, b.backends, strict=True) if x != y)
            what = " and ".join(
                f"{n} of {len(b.backends)} units to {name}" for name, n in moved.most_common()
            )
        return f"{passes_of(bucket, more)}: {what} ({gain(a.seconds, b.seconds)})"


def _is_reached(bucket: str, ubatch: int) -> bool:
    """Whether a pass may have as many tokens."""
    return bucket != BUCKETS[-1] or ubatch > TOKENS[-1]


def weight_of(bucket: str, now: PlanConditions) -> float:
    """How often passes of a bucket run, usually and recently."""
    seen = sum(now.passes.values())
    return USUAL[bucket] + (sum(USUAL.values()) * now.passes.get(bucket, 0) / seen if seen else 0)


def passes_of(bucket: str, more: int = 0) -> str:
    """Which passes change, and of how many other sizes."""
    tokens = "1 token" if bucket == "1" else f"{bucket} tokens"
    return f"passes of {tokens}" + (f" and {counted(more, 'other size')}" if more else "")


def gain(before: float, after: float) -> str:
    """What a change is expected to bring: seconds of a pass."""
    if before == float("inf"):  # it cannot run as it did
        return f"{ms(after)} a pass expected"
    less = 1 - after / before if before else 0.0
    return f"{ms(before)} -> {ms(after)} a pass, {less:.0%} less time expected"


def ms(seconds: float) -> str:
    """Three figures of milliseconds."""
    return f"{1000 * seconds:.3g} ms"
