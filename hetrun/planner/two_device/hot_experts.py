"""Hot experts: of each mixture those that tokens choose most lie in a device's own memory, and are computed
there while the host computes the others.

How many of which layer is decided for all sizes of passes together, as they share what the device holds. An
expert more on the device is worth what a pass takes less then, both sides beside each other; the room goes
where a byte of it is worth most. So each layer gets about as many as let both sides end together, fewer where
room is short, and more where few experts are chosen by most tokens.

Where the device has slots, and the host leaves to it what lies in them, the plan only says how many there
are and what lies in them at first; what lies there then follows the text (executor/device_experts.py). They
are timed as if the experts that are chosen most lay there.

Elsewhere experts stay until others are worth more by as much as any new plan must be. Others come beside
them, in what room is left, and only then they go; so a device changes over a few layers at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetrun.backend import Backend, Floats, WeightUse
from hetrun.graph import spelled
from hetrun.graph.ops import Moe
from hetrun.graph.sharding import Share
from hetrun.graph.signature import coarse
from hetrun.planner.online import Likely
from hetrun.planner.plan import Placement, Plan
from hetrun.planner.two_device.balance import OpGroup
from hetrun.planner.two_device.candidates import PlacementCandidate, Split, Taken
from hetrun.planner.two_device.cost import DeviceTimes, PassSetting
from hetrun.planner.two_device.expert_cost import ExpertRates, Seconds, by_heat, heat_of, mixture_of

WORTH = 0.03  # of a mixture's time: what other experts there must bring
SPARE = 1 / 8  # of the room, if there are many layers: free for others to come beside what is there
MOVED = 0.1  # of what tokens choose: so much more could lie on the device
SPARE_OF_SLOTS = 1 / 16  # the same where experts move: new plans come for other numbers of slots only
NAMED = 6  # experts, in a reason

Experts = tuple[int, ...]  # ascending
Sets = Mapping[str, Experts]  # by the scope of a mixture: those that lie on the device


@dataclass(frozen=True, slots=True)
class PassSize:
    """A size of pass, and how often there are such ones."""

    at: PassSetting
    weight: float


@dataclass(frozen=True, slots=True)
class ExpertDevice:
    """Where experts may lie, and beside whom."""

    host: str
    other: str
    free: int  # bytes of the room for weights; less than none where some have to go
    scopes: frozenset[str]  # of the mixtures that the host has


@dataclass(frozen=True, slots=True)
class MixtureLayer:
    """A mixture on two sides."""

    operation: OpGroup
    heat: Floats
    sides: tuple[tuple[PassSize, ExpertRates, ExpertRates], ...]  # on the host, and on the other device
    each: int  # bytes of an expert on the device
    moving: bool  # what lies there follows what tokens choose
    besides: int  # bytes, if there is any

    @property
    def scope(self) -> str:
        """Where it stands in the graph."""
        return mixture_of(self.operation).scope

    @property
    def order(self) -> list[int]:
        """Its experts, those first that are chosen most."""
        return by_heat(self.heat)

    def nbytes(self, n: int) -> int:
        """Bytes of `n` experts."""
        return self.besides + n * self.each if n else 0

    def seconds(self, order: Sequence[int], most: int) -> Seconds:
        """What passes take, by how often there are some, with none of an order on the device, one, two..."""
        heat, rest = self.heat[order], self.heat[order][::-1]
        total = np.zeros(most + 1)
        for p, here, there in self.sides:
            mine = here.up_to(rest, p.at.tokens)[::-1][: most + 1]
            both = np.maximum(mine, there.up_to(heat, p.at.tokens)[: most + 1])
            total += p.weight * np.minimum(both, mine[0])  # the host alone may be better
        return total

    def seconds_with(self, experts: Experts) -> float:
        """The same with these experts there, or as many slots."""
        experts = settled(experts, self.heat) if self.moving else experts
        others = sorted({*range(len(self.heat))} - {*experts})
        return float(self.seconds([*experts, *others], len(experts))[-1])


class HotExperts:
    """Which experts of a graph lie on which device."""

    def __init__(self, sides: DeviceTimes, backends: Mapping[str, Backend]) -> None:
        self._sides, self._backends = sides, backends
        self.mixtures = [o for layer in sides.layers for o in layer if _is_mixture(o)]
        self.kept_free: dict[str, int] = {}  # by device bytes that nothing else gets
        self._sets: dict[str, Sets] = {}  # by device
        self._moving: dict[str, bool] = {}
        self._asked = 0.0  # how much more could have lain there when nothing was changed

    def __bool__(self) -> bool:
        return bool(self.mixtures)

    @property
    def likely(self) -> Likely:
        """What is known of tokens' choices."""
        return self._sides.likely

    # --- which experts

    def choose(
        self, device: ExpertDevice, points: Sequence[PassSize], plans: Iterable[Plan], fixed: bool
    ) -> None:
        """Decide it again for a device; `fixed`: what lies there stays, and nothing comes."""
        self._moving[device.other] = self._moves(device.host, device.other)
        layers = [layer for o in self.mixtures if (layer := self._layer(o, device, points))]
        known = {layer.scope: layer for layer in layers}
        sets = {s: experts for s, experts in sets_of(plans, device.other).items() if s in known}
        room = device.free + sum(known[s].nbytes(len(experts)) for s, experts in sets.items())
        if device.free < 0:
            sets = _within(sets, layers, room)
        wanted, spare = _wanted(layers, room)
        coming = 0
        if not fixed:
            sets, coming = _changed(sets, wanted, layers, room, device.free)
        self.kept_free[device.other] = max(0, min(device.free - coming, spare))
        self._sets[device.other] = {scope: experts for scope, experts in sets.items() if experts}
        self._asked = self._more_possible(self._sets[device.other])

    def _moves(self, host: str, other: str) -> bool:
        """Whether experts change places between two backends while the model runs."""
        return self._backends[host].leaves_to_slots and self._backends[other].expert_slots() is not None

    def _layer(self, o: OpGroup, device: ExpertDevice, points: Sequence[PassSize]) -> MixtureLayer | None:
        """What is known of a mixture; None if it is not the host's, would not
        stay on the device, or was not measured on both."""
        op, found = mixture_of(o), list[tuple[PassSize, ExpertRates, ExpertRates]]()
        if op.scope not in device.scopes:
            return None
        heat = heat_of(op, self.likely)
        for p in points:
            here = self._sides.rates(o, device.host, p.at, heat)
            there = self._sides.rates(o, device.other, p.at, heat)
            if here is None or there is None:
                return None
            found.append((p, here, there))
        router, *matrices = op.weights
        backend, n = self._backends[device.other], len(heat)
        some = [WeightUse(w.rows(0, w.shape[0] // n), "experts", 1) for w in matrices]
        if any(map(backend.streams, some)):
            return None
        besides = backend.device_bytes([WeightUse(router, "vector")])
        each = max(1, backend.device_bytes(some))
        return MixtureLayer(o, heat, tuple(found), each, self._moving[device.other], besides)

    # --- plans

    def goes_with(self, plan: Plan) -> bool:
        """Whether a plan's experts lie where they were decided to lie."""
        return all(
            self._sets.get(b, {}).get(scope) == experts
            for b in {p.backend for p in plan.placements if p.share and p.share.kind == "experts"}
            for scope, experts in sets_of([plan], b).items()
        )

    def split(self, host: str, other: str, at: PassSetting) -> Split:
        """For each mixture what it takes with both sides at once, and the placements of that."""

        def taken(o: OpGroup) -> Taken:
            op = mixture_of(o)
            heat = heat_of(op, self.likely)
            here, there = (self._sides.rates(o, b, at, heat) for b in (host, other))
            experts = self._sets.get(other, {}).get(op.scope, ())
            alone = here.seconds(heat, at.tokens) if here else 0.0
            if not here or not there or not experts:
                return alone, []
            others = tuple(sorted({*range(len(heat))} - {*experts}))
            moving = self._moves(host, other)
            mine = settled(experts, heat) if moving else experts
            rest = sorted({*range(len(heat))} - {*mine})
            both = [here.seconds(heat[rest], at.tokens), there.seconds(heat[[*mine]], at.tokens)]
            if max(both) >= (1 - WORTH) * alone:
                return alone, []
            chosen = heat[[*mine]].sum() / heat.sum()
            ends = f"takes {1000 * both[1]:.3g} ms, and {host} {1000 * both[0]:.3g} ms for the others"
            known = self.likely(op.weights[0].name) is not None
            why = f"{_named(experts)} of {len(heat)} experts, chosen by {chosen:.0%} of the tokens; {ends}"
            if moving:
                why = f"{_slots(experts, len(heat), float(chosen), known)}; {ends}"
            left = f"the experts that are not on {other}; all of them would take {1000 * alone:.3g} ms"
            return max(both), [
                Placement(op.scope, host, left, _share(others, experts, others, moving)),
                Placement(op.scope, other, why, _share(others, experts, experts, moving)),
            ]

        return taken

    def beside(
        self, in_turn: Plan, there: Container[str], host: str, at: PassSetting, split: Split
    ) -> Iterator[PlacementCandidate]:
        """A plan in which backends take turns, with experts on the other device beside those of the host;
        `there`: the units that the host runs by it."""
        clocked = self._sides.clock(in_turn, at)
        mine = [o for o in self.mixtures if coarse(o.scopes[0]) in there]
        costs, taken = [self._sides.cost(o, host, at) for o in mine], [split(o) for o in mine]
        placed = [p for _, placements in taken for p in placements]
        if clocked and placed:
            saved = sum(c.seconds - seconds for c, (seconds, _) in zip(costs, taken, strict=True) if c)
            yield PlacementCandidate((*in_turn.placements, *placed), clocked.seconds - saved)

    # --- while the model runs

    def surprised(self) -> str:
        """Whether tokens choose other experts than those that lie on devices; empty if not."""
        for other, sets in self._sets.items():
            if self._moving[other]:
                continue  # they are followed without a new plan
            more = self._more_possible(sets)
            if more > MOVED and more > self._asked + MOVED / 2:
                return f"tokens choose other experts now: {more:.0%} more of the choices could be on {other}"
        return ""

    def _more_possible(self, sets: Sets) -> float:
        """Of all choices in layers that have experts there how many more could be of those, if they were the
        best ones."""
        now = best = total = 0.0
        for o in self.mixtures:
            op = mixture_of(o)
            heat, experts = heat_of(op, self.likely), sets.get(op.scope, ())
            now += float(heat[[*experts]].sum())
            best += float(np.sort(heat)[::-1][: len(experts)].sum())
            total += float(heat.sum()) * bool(experts)
        return (best - now) / total if total else 0.0


def sets_of(plans: Iterable[Plan], backend: str) -> dict[str, Experts]:
    """The experts that plans have on a device, by scope."""
    return {
        p.scope: tuple(sorted(p.share.order[p.share.a : p.share.b]))
        for plan in plans
        for p in plan.placements
        if p.backend == backend and p.share and p.share.order and not p.share.whole
    }


def settled(experts: Experts, heat: Floats) -> Experts:
    """What lies in the slots of some experts once it has followed what tokens choose."""
    return tuple(sorted(by_heat(heat)[: len(experts)]))


def _is_mixture(o: OpGroup) -> bool:
    mixtures = [op for op in o.ops if isinstance(op.attrs, Moe)]
    return len(mixtures) == 1


def _share(others: Experts, experts: Experts, mine: Experts, moving: bool) -> Share:
    of, here = len(others) + len(experts), mine is others
    a, b = (0, len(others)) if here else (len(others), of)
    return Share("experts", a, b, of, (*others, *experts), whole=here, moving=moving)


def _slots(experts: Experts, of: int, found: float, known: bool) -> str:
    """How many there are, and how often what tokens choose should lie there."""
    by = "by what was counted" if known else "if all are chosen alike: nothing is counted yet"
    return f"slots for {len(experts)} of {of} experts, which follow the text; {found:.0%} found there {by}"


def _named(experts: Experts) -> str:
    """Some of them, by their numbers."""
    runs: list[list[int]] = []
    for n in experts:
        if runs and runs[-1][1] == n:
            runs[-1][1] += 1
        else:
            runs.append([n, n + 1])
    more = sum(b - a for a, b in runs[NAMED:])
    text = ", ".join(spelled(a, b) for a, b in runs[:NAMED])
    return f"{text} and {more} more" if more else text


# --- room


def _wanted(layers: Sequence[MixtureLayer], room: int) -> tuple[dict[str, Experts], int]:
    """The experts that should lie on the device if it were empty, and how much room they leave: enough for
    others of any layer to come beside them, so no layer has more; less where others come into their slots."""
    if layers and all(layer.moving for layer in layers):
        spare, most = int(room * SPARE_OF_SLOTS), [len(layer.heat) - 1 for layer in layers]
    else:
        spare = int(room * max(SPARE, 1 / (len(layers) + 1)))
        most = [min(len(layer.heat) - 1, (spare - layer.besides) // layer.each) for layer in layers]
    curves = [layer.seconds(layer.order, max(0, n)) for layer, n in zip(layers, most, strict=True)]
    counts = _spend(layers, curves, room - spare)
    wanted = {layer.scope: layer.order[:n] for layer, n in zip(layers, counts, strict=True) if n}
    return {scope: tuple(sorted(experts)) for scope, experts in wanted.items()}, spare


def _spend(layers: Sequence[MixtureLayer], curves: Sequence[Seconds], room: int) -> list[int]:
    """How many experts each layer gets: always what brings most for its bytes."""
    counts, steps = [0] * len(layers), list[tuple[float, int, int]]()

    def push(i: int, most: int) -> None:
        n, curve = counts[i], curves[i]
        more = np.arange(n + 1, most + 1)
        if not len(more):
            return
        nbytes = np.array([max(1, layers[i].nbytes(int(m)) - layers[i].nbytes(n)) for m in more])
        worth = (curve[n] - curve[more]) / nbytes
        best = int(np.argmax(worth))
        if worth[best] > 0:
            heapq.heappush(steps, (-float(worth[best]), i, int(more[best])))

    for i, curve in enumerate(curves):
        push(i, len(curve) - 1)
    while steps:
        _, i, n = heapq.heappop(steps)
        before = layers[i].nbytes(counts[i])
        if (size := layers[i].nbytes(n) - before) <= room:
            room, counts[i] = room - size, n
            push(i, len(curves[i]) - 1)
            continue
        fitting = [m for m in range(counts[i] + 1, n) if layers[i].nbytes(m) - before <= room]
        if fitting:
            push(i, fitting[-1])
    return counts


def _within(sets: Sets, layers: Sequence[MixtureLayer], room: int) -> dict[str, Experts]:
    """Of the experts that lie there those of as many layers as still have room, what is worth most first."""
    mine = {layer.scope: layer for layer in layers}

    def worth(scope: str) -> float:
        layer, experts = mine[scope], sets[scope]
        gain = layer.seconds_with(()) - layer.seconds_with(experts)
        return gain / max(1, layer.nbytes(len(experts)))

    kept: dict[str, Experts] = {}
    for scope in sorted(sets, key=worth, reverse=True):
        size = mine[scope].nbytes(len(sets[scope]))
        if size <= room:
            kept[scope], room = sets[scope], room - size
    return kept


def _changed(
    old: Sets, wanted: Sets, layers: Sequence[MixtureLayer], room: int, free: int
) -> tuple[dict[str, Experts], int]:
    """What lies there, with as many of the changes as are worth it and have room beside what goes; the bytes
    that come."""
    found, coming = dict(old), 0
    room -= sum(layer.nbytes(len(old.get(layer.scope, ()))) for layer in layers)
    changes = []
    for layer in layers:
        before, after = old.get(layer.scope, ()), wanted.get(layer.scope, ())
        took = layer.seconds_with(before)
        gain = took - layer.seconds_with(after)
        if before != after and gain > WORTH * took:
            changes.append((gain / max(1, layer.nbytes(len(after))), layer, before, after))
    for _, layer, before, after in sorted(changes, key=lambda c: -c[0]):
        new = layer.nbytes(len(after))
        more = new - layer.nbytes(len(before))
        if coming + new <= free and more <= room:
            found[layer.scope], coming, room = after, coming + new, room - more
    return found, coming
