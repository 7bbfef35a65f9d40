"""Which weights are held where, under one budget: several copies where that pays, exactly.

Each bucket places its units freely among the copies that are held, and a copy serves all buckets. Where
everything that the buckets would like fits, nothing is to be decided. Where it does not, this is an integer
programme: small ones are enumerated, the others go to HiGHS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from hetrun.errors import BudgetError
from hetrun.planner.shortest_path import Chain
from hetrun.system.units import format_bytes, format_minimum

if TYPE_CHECKING:
    from hetrun.planner.milp import Programme

MOST_ENUMERATED = 1 << 12  # sets of copies
GAP = 1e-4  # relative: measurements are no better than this
LONGEST_S = 1.0  # that HiGHS may take while a request waits: what it found by then is hardly worse

Copy = tuple[int, str]  # the number of a unit, and the backend that holds its weights


@dataclass(frozen=True, slots=True)
class BucketDemand:
    """One bucket: how its units run with each number of threads, and how much it counts."""

    weight: float  # passes of this bucket among all
    # By number of threads; -1 times that where devices alone compute, in passes of more tokens than a host's.
    ways: Mapping[int, Chain]


@dataclass(frozen=True, slots=True)
class BucketPlacement:
    """What was decided for one bucket."""

    way: int
    backends: tuple[str, ...]
    seconds: float
    given: float = 0.0  # seconds of them for results that are closer to the model's

    @property
    def threads(self) -> int:
        """Of the host, what it computes with."""
        return abs(self.way)


@dataclass(frozen=True, slots=True)
class Copies:
    """What copies take: each its weights, and each backend that holds any something besides."""

    nbytes: Mapping[Copy, int]
    fixed: Mapping[str, int]
    room: int
    own_bytes: Mapping[Copy, int] = field(default_factory=dict)  # of memory that a device has to itself
    own_room: Mapping[str, int] = field(default_factory=dict)  # by backend with such memory

    def total(self, held: frozenset[Copy]) -> int:
        """Bytes of some copies."""
        backends = {b for _, b in held}
        return sum(self.nbytes[c] for c in held) + sum(self.fixed.get(b, 0) for b in backends)

    def own_total(self, held: frozenset[Copy], backend: str) -> int:
        """Bytes of the copies in the memory of one device."""
        return sum(self.own_bytes.get(c, 0) for c in held if c[1] == backend)

    def fit(self, held: frozenset[Copy]) -> bool:
        """Whether there is room for some copies."""
        return self.total(held) <= self.room and all(
            self.own_total(held, b) <= room for b, room in self.own_room.items()
        )

    def could_hold(self, c: Copy) -> bool:
        """Whether one copy is not too large by itself."""
        own = self.own_room.get(c[1])
        return self.nbytes[c] <= self.room and (own is None or self.own_bytes.get(c, 0) <= own)


def place_all(demands: Sequence[BucketDemand], copies: Copies) -> list[BucketPlacement]:
    """The placements of all buckets that take least time in all, within the memory there is."""
    free = [best_of(d) for d in demands]
    if copies.fit(used_by(free)):
        return free
    candidates = _candidates(demands, copies)
    if 2 ** len(candidates) <= MOST_ENUMERATED:
        found = _enumerate(demands, copies, candidates)
    else:
        found = _solve(demands, copies, candidates)
    if found is None:
        least = sum(min((copies.nbytes[i, b] for b in t), default=0) for i, t in enumerate(_units(demands)))
        raise BudgetError(
            f"the weights need at least {format_minimum(least)}, and there is room for "
            f"{format_bytes(copies.room)}: allow more with --ram, or use a smaller model"
        )
    return [best_of(d, found) for d in demands]


def cost(demands: Sequence[BucketDemand], placed: Sequence[BucketPlacement]) -> float:
    """Seconds of all passes, each bucket counted by its weight."""
    return sum(d.weight * p.seconds for d, p in zip(demands, placed, strict=True))


def best_of(demand: BucketDemand, held: frozenset[Copy] | None = None) -> BucketPlacement:
    """The best number of threads and placement of one bucket, on some copies or on all that could be."""
    found = []
    for way, chain in demand.ways.items():
        if held is not None:
            units = range(len(chain.times))
            chain = chain.only([frozenset(b for b in chain.times[i] if (i, b) in held) for i in units])
        if all(chain.times):
            backends = chain.best()
            found.append(BucketPlacement(way, backends, chain.seconds(backends)))
    return min(found, key=lambda p: p.seconds)


def used_by(placed: Sequence[BucketPlacement]) -> frozenset[Copy]:
    """The copies that placements need."""
    return frozenset((i, b) for p in placed for i, b in enumerate(p.backends))


def _units(demands: Sequence[BucketDemand]) -> list[set[str]]:
    """The backends that each unit could run on in every bucket."""
    chains = [chain for d in demands for chain in d.ways.values()]
    return [
        set.intersection(*(set(t) for t in times)) for times in zip(*(c.times for c in chains), strict=True)
    ]


def _candidates(demands: Sequence[BucketDemand], copies: Copies) -> list[Copy]:
    chains = [chain for d in demands for chain in d.ways.values()]
    named = dict.fromkeys((i, b) for chain in chains for i, times in enumerate(chain.times) for b in times)
    return [c for c in named if copies.could_hold(c)]


def _enumerate(
    demands: Sequence[BucketDemand], copies: Copies, candidates: Sequence[Copy]
) -> frozenset[Copy] | None:
    """Every set of copies that fits and leaves no unit without a place."""
    best: tuple[float, frozenset[Copy]] | None = None
    for held in _sets(candidates):
        if not copies.fit(held) or not complete(demands, held):
            continue
        seconds = sum(d.weight * best_of(d, held).seconds for d in demands)
        if best is None or seconds < best[0]:
            best = seconds, held
    return best[1] if best else None


def _sets(candidates: Sequence[Copy]) -> Iterator[frozenset[Copy]]:
    for chosen in product((False, True), repeat=len(candidates)):
        yield frozenset(c for c, yes in zip(candidates, chosen, strict=True) if yes)


def complete(demands: Sequence[BucketDemand], held: frozenset[Copy]) -> bool:
    """Whether every bucket can run on these copies alone."""
    return all(
        any(
            all(any((i, b) in held for b in times) for i, times in enumerate(chain.times))
            for chain in d.ways.values()
        )
        for d in demands
    )


def _solve(
    demands: Sequence[BucketDemand], copies: Copies, candidates: Sequence[Copy]
) -> frozenset[Copy] | None:
    """The integer programme: x places a unit of a bucket with some threads, y holds a copy, z joins two
    neighbours into one segment, p chooses the threads of a bucket, s starts a backend."""
    from hetrun.planner.milp import Programme  # on use: it imports HiGHS

    lp = Programme()
    held = {c: lp.binary(0.0) for c in candidates}
    starts = {b: lp.binary(0.0) for b in {b for _, b in candidates}}
    for (_, b), y in held.items():
        lp.at_most({y: 1, starts[b]: -1}, 0)
    room = {y: float(copies.nbytes[c]) for c, y in held.items()}
    room |= {s: float(copies.fixed.get(b, 0)) for b, s in starts.items()}
    lp.at_most(room, copies.room)
    for b, own_room in copies.own_room.items():
        own = {y: float(copies.own_bytes.get(c, 0)) for c, y in held.items() if c[1] == b}
        if own:
            lp.at_most(own, own_room)
    for d in demands:
        _add_bucket(lp, d, held)
    chosen = lp.solve(GAP, LONGEST_S)
    return None if chosen is None else frozenset(c for c, y in held.items() if chosen[y])


def _add_bucket(lp: Programme, demand: BucketDemand, held: Mapping[Copy, int]) -> None:
    choices = {threads: lp.binary(0.0) for threads in demand.ways}
    lp.equal(dict.fromkeys(choices.values(), 1.0), 1)
    for threads, chain in demand.ways.items():
        before: dict[str, int] = {}
        for i, times in enumerate(chain.times):
            here = {b: lp.share(demand.weight * t) for b, t in times.items() if (i, b) in held}
            lp.equal(dict.fromkeys(here.values(), 1.0) | {choices[threads]: -1.0}, 0)
            for b, x in here.items():
                lp.at_most({x: 1, held[i, b]: -1}, 0)
                if b in before and chain.call.get(b):
                    joined = lp.share(-demand.weight * chain.call[b])
                    lp.at_most({joined: 1, x: -1}, 0)
                    lp.at_most({joined: 1, before[b]: -1}, 0)
            before = here
