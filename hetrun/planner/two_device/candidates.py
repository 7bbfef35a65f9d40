"""Ways to keep two devices busy in one pass: operations on one side or the other, or shared out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetrun.graph import Op
from hetrun.graph.ops import Attention, Moe
from hetrun.graph.sharding import Kind, Share, shared_by_heads
from hetrun.graph.signature import coarse
from hetrun.planner.plan import Placement, Plan
from hetrun.planner.two_device.balance import SCORE, OpGroup, balance, placements
from hetrun.planner.two_device.cost import PRODUCTS, DeviceTimes, PassSetting
from hetrun.planner.two_device.expert_cost import OperationCost

WORTH = 0.03  # of an operation's time: what sharing it out must bring
PIECES = (16, 8, 4, 2)  # that rows are shared out in, so that plans for several sizes share what they hold
ROWS = 8  # kernels like borders at multiples of this
ATTENTION = ("q", "k", "v", SCORE, "out")
FEED_FORWARD = ("mlp1", "mlp2")
EVERYTHING = (*ATTENTION, *FEED_FORWARD)

Scoring = Mapping[int, Mapping[str, float]]  # layer -> backend -> part of the heads that attend there


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """Placements with two devices, and about what a pass takes."""

    placements: tuple[Placement, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Pair:
    """The engine's thread with one backend, and another backend that works by itself."""

    host: str
    other: str
    moving: float  # seconds of a pass to pay for the keys and values of a layer that change sides

    def both(self, scope: str, share: Share, why: str) -> list[Placement]:
        """The share on the other device, what is before it on the host."""
        rest = Share(share.kind, 0, share.a, share.of)
        return [Placement(scope, self.host, why, rest), Placement(scope, self.other, why, share)]


Part = tuple[OpGroup, OperationCost, OperationCost]  # on the host, and on the other device
Taken = tuple[float, list[Placement]]  # what some operations take, and what of them is placed
Split = Callable[[OpGroup], Taken]


class CandidateSet:
    """Candidates for one size of pass."""

    def __init__(
        self, sides: DeviceTimes, pair: Pair, at: PassSetting, staying: Mapping[str, str], split: Split
    ) -> None:
        """`staying`: units that run on a third backend in any case, and on which; the pair has the others.
        `split`: what becomes of a mixture, by the experts that lie on the other device."""
        self._sides, self._pair, self._experts = sides, pair, split
        free = [[o for o in layer if _unit(o) not in staying] for layer in sides.layers]
        found = [self._parts(layer, at) for layer in free if layer]
        self._layers = [layer for layer in found if layer]
        others = [*sides.outside, *(o for layer in sides.layers for o in layer if _unit(o) in staying)]
        costs = [sides.cost(o, staying.get(_unit(o), pair.host), at) for o in others]
        self._outside = sum(c.seconds for c in costs if c)
        self._known = bool(found) and all(found) and None not in costs
        stays = (Placement(unit, b, "its weights stay there") for unit, b in staying.items())
        self._rest = (Placement("", pair.host, f"while {pair.other} computes"), *stays)

    def _parts(self, layer: Sequence[OpGroup], at: PassSetting) -> list[Part]:
        """What was measured of a layer on both sides; nothing if something was not."""
        found: list[Part] = []
        for o in layer:
            here, there = (self._sides.cost(o, b, at) for b in (self._pair.host, self._pair.other))
            if here is None or there is None:
                return []
            found.append((o, here, there))
        return found

    def candidates(self, scoring: Scoring) -> Iterator[PlacementCandidate]:
        """What is worth a closer look; `scoring`: where keys and values are now."""
        if not self._known:
            return
        found = [self._balanced(scoring), self._shared(by_heads=False), self._shared(by_heads=True)]
        found += [self._spread(scoring, names) for names in (EVERYTHING, ATTENTION, FEED_FORWARD)]
        yield from (c for c in found if len(c.placements) > len(self._rest))

    # --- balanced

    def _balanced(self, scoring: Scoring) -> PlacementCandidate:
        """Every layer with the least makespan, where the other device has to bring weights."""
        if not self._loads:
            return PlacementCandidate(self._rest, self._outside)
        found, seconds = [*self._rest], 0.0
        rest = self._outside / len(self._layers)
        for layer in self._layers:
            host = [h.seconds + self._moving(o, self._pair.host, scoring) for o, h, _ in layer]
            between = [c.seconds + self._moving(o, self._pair.other, scoring) for o, _, c in layer]
            best = balance(host, [c.load for _, _, c in layer], between, rest)
            placed = placements(best, [o for o, _, _ in layer], self._pair.host, self._pair.other)
            found += [p for p in placed if p.backend == self._pair.other]
            seconds += best.seconds
        return PlacementCandidate(tuple(found), seconds)

    @property
    def _loads(self) -> bool:
        """Whether the other device has to bring weights."""
        return any(c.load for layer in self._layers for _, _, c in layer)

    # --- spread

    def _spread(self, scoring: Scoring, names: Sequence[str]) -> PlacementCandidate:
        """Whole parts of some layers on the other device, evenly spread, as many as keep its link as busy as
        the chain: fewer changes of sides than where each layer gives a little (LIA's whole layers)."""
        layers = [[part for part in layer if part[0].name in names] for layer in self._layers]
        layers = [layer for layer in layers if layer]
        if not self._loads or not layers:
            return PlacementCandidate(self._rest, self._outside)
        pair = self._pair
        host = [sum(h.seconds + self._moving(o, pair.host, scoring) for o, h, _ in layer) for layer in layers]
        between = [
            _together([c for _, _, c in layer]).seconds
            + sum(self._moving(o, pair.other, scoring) for o, _, _ in layer)
            for layer in layers
        ]
        loads = [sum(c.load for _, _, c in layer) for layer in layers]
        alone = self._outside + sum(h.seconds for layer in self._layers for _, h, _ in layer)

        def seconds(n: int) -> float:
            some = evenly(n, len(layers))
            return max(alone + sum(between[i] - host[i] for i in some), sum(loads[i] for i in some))

        best = min(range(len(layers) + 1), key=seconds)
        why = f"weights of {best} of {len(layers)} layers are copied to the device while others compute"
        placed = [
            Placement(scope, pair.other, why)
            for i in evenly(best, len(layers))
            for o, _, _ in layers[i]
            for scope in o.scopes
        ]
        return PlacementCandidate((*self._rest, *placed), seconds(best))

    def _moving(self, o: OpGroup, backend: str, scoring: Scoring) -> float:
        """What the keys and values of an operation pay for coming to a backend."""
        layers = [op.attrs.layer for op in o.ops if isinstance(op.attrs, Attention)]
        return sum(self._pair.moving * (1 - scoring.get(i, {}).get(backend, 0.0)) for i in layers)

    # --- shared out

    def _shared(self, by_heads: bool) -> PlacementCandidate:
        """Every operation on both sides where that is worth it; attention as a whole, or one by one."""
        taken: list[Taken] = []
        for layer in self._layers:
            attention = [part for part in layer if by_heads and part[0].name in ATTENTION]
            ops = [op for o, _, _ in attention for op in o.ops]
            if attention and not shared_by_heads(ops, coarse(ops[0].scope)):
                attention = []
            if attention:
                taken.append(self._heads(attention))
            taken += [self._split(*part) for part in layer if part not in attention]
        seconds = self._outside + sum(s for s, _ in taken)
        return PlacementCandidate((*self._rest, *(p for _, placed in taken for p in placed)), seconds)

    def _heads(self, attention: Sequence[Part]) -> Taken:
        """A layer's attention by heads, all of its operations together."""
        here, there = _together([h for _, h, _ in attention]), _together([c for _, _, c in attention])
        ops = [op for o, _, _ in attention for op in o.ops]
        n = next((op.attrs.n_kv_heads for op in ops if isinstance(op.attrs, Attention)), 1)
        some, seconds = share(here, there, n)
        if seconds >= (1 - WORTH) * here.seconds:
            return here.seconds, []
        why = self._why(seconds, here)
        return seconds, self._pair.both(coarse(ops[0].scope), Share("heads", n - some, n, n), why)

    def _split(self, o: OpGroup, here: OperationCost, there: OperationCost) -> Taken:
        """One operation: on the host, on the other side, or some of its rows or experts on each."""
        alone = max(there.seconds, there.load)
        kind, pieces, widths = _pieces(o.ops)
        if kind == "experts" and (taken := self._experts(o))[1]:
            return taken
        some, seconds = share(here, there, pieces)
        if seconds < (1 - WORTH) * min(here.seconds, alone):
            why = self._why(seconds, here)
            cuts = {scope: Share(kind, n - n * some // pieces, n, n) for scope, n in widths.items()}
            return seconds, [p for scope, cut in cuts.items() for p in self._pair.both(scope, cut, why)]
        if alone < (1 - WORTH) * here.seconds:
            why = f"takes {1000 * alone:.3g} ms; {self._pair.host} would take {1000 * here.seconds:.3g} ms"
            return alone, [Placement(scope, self._pair.other, why) for scope in o.scopes]
        return here.seconds, []

    def _why(self, seconds: float, here: OperationCost) -> str:
        both = f"both take {1000 * seconds:.3g} ms"
        return f"divided: {both}; {self._pair.host} alone would take {1000 * here.seconds:.3g} ms"


def share(here: OperationCost, there: OperationCost, pieces: int) -> tuple[int, float]:
    """How many of some pieces the other device takes, and when both are done: at the same time, as far as
    whole pieces allow. Of a single piece there is nothing to share."""
    ends = [
        (max(here.part(1 - n / pieces), there.part(n / pieces), n / pieces * there.load), n)
        for n in range(1, pieces)
    ]
    seconds, some = min(ends, default=(float("inf"), 0))
    return some, seconds


def _unit(o: OpGroup) -> str:
    return coarse(o.scopes[0])


def evenly(n: int, of: int) -> list[int]:
    """The numbers of n things among `of`, as far from each other as possible."""
    return [(2 * i + 1) * of // (2 * n) for i in range(n)]


def _together(costs: Sequence[OperationCost]) -> OperationCost:
    """Operations as one, which have what is fixed only once each on their own."""
    return OperationCost(
        sum(c.seconds for c in costs), max(c.fixed for c in costs), sum(c.load for c in costs)
    )


def _pieces(ops: Sequence[Op]) -> tuple[Kind, int, dict[str, int]]:
    """How an operation can be cut, into how many pieces; by scope, how many rows or experts there are."""
    experts = {op.scope: op.attrs.matrices for op in ops if isinstance(op.attrs, Moe)}
    if experts:
        return "experts", min(experts.values()), experts
    rows = {op.scope: op.out.width for op in ops if op.kind in PRODUCTS}
    fits = (n for n in PIECES if rows and all(width % (n * ROWS) == 0 for width in rows.values()))
    return "rows", next(fits, 1), rows


def scoring_of(plan: Plan) -> Scoring:
    """Which parts of each layer's heads attend on which backend."""
    heads: dict[int, dict[str, float]] = {}
    for s in plan.segments:
        for op in s.ops:
            if isinstance(op.attrs, Attention):
                sides = heads.setdefault(op.attrs.layer, {})
                sides[s.backend] = sides.get(s.backend, 0.0) + op.attrs.n_heads
    return {i: {b: n / sum(sides.values()) for b, n in sides.items()} for i, sides in heads.items()}
