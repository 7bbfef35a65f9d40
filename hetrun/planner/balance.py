"""Two devices on one layer: which of its operations each one takes, so that both are done as early as can be.

This is the programme of TwinPilots (Yu et al., SYSTOR 2024). A layer is seven operations: the projections
to q, k and v, the attention over what was seen (score), the projection behind it (out), and the two halves of
the feed-forward part (mlp1, mlp2). The host computes its operations in place; the other device has to bring
weights or keys and values over a link first, and does that ahead of time. So two sums count, whatever waits
for what: find the assignment whose larger sum, lambda, is least.

Times come from records by (operation, device, batch, length): what was measured goes into a forecast under
the form of the operation's ops, and is asked for any batch and length. The paper's algorithm averages
time / (b * s) for score and then multiplies by b alone; we take that for a slip, as s is one of its inputs:
here the time of score grows with b * s, as it was measured.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hetrun.errors import OptionError
from hetrun.forecast import Forecast, Work
from hetrun.forms import form_of
from hetrun.graph import Graph, Op, in_scope
from hetrun.plan import Placement

log = logging.getLogger(__name__)

ENUMERATED = 16  # operations; with more there are too many assignments to look at each
SOLVE_SECONDS = 10.0
DRIFT = 0.1  # of a time: less is no reason to decide anew
RESIDENT = "resident"  # on the other device, without bringing weights over the link
SCORE = "score"
# The last part of a scope, and whose operation it is; a norm belongs to the first that reads it.
PARTS = {
    "q": "q", "k": "k", "v": "v", "score": SCORE, "out": "out",
    "gate": "mlp1", "up": "mlp1", "down": "mlp2", "exp": "mlp2",
}  # fmt: skip


class Balance(NamedTuple):
    """For each operation whether it runs on the host, and how long the busier device is busy."""

    on_host: tuple[bool, ...]
    seconds: float


def balance(host: Sequence[float], other: Sequence[float]) -> Balance:
    """The assignment with the least makespan, exactly; `host` and `other`: what each operation takes there.

    Among equally good assignments the enumeration takes the one with the least work in all.
    """
    if len(host) != len(other):
        raise ValueError(f"{len(host)} times on the host and {len(other)} on the other device")
    if not np.isfinite([*host, *other]).all() or min([*host, *other], default=0.0) < 0:
        raise ValueError(
            "times must be numbers of 0 or more; an operation has to be measured before it is placed"
        )
    chosen = _enumerate(host, other) if len(host) <= ENUMERATED else _solve(host, other)
    return Balance(chosen, makespan(chosen, host, other))


def makespan(on_host: Sequence[bool], host: Sequence[float], other: Sequence[float]) -> float:
    """How long the busier of the two is busy."""
    mine = sum(h for h, here in zip(host, on_host, strict=True) if here)
    rest = sum(o for o, here in zip(other, on_host, strict=True) if not here)
    return float(max(mine, rest))


def _enumerate(host: Sequence[float], other: Sequence[float]) -> tuple[bool, ...]:
    """Every assignment."""
    n = len(host)
    here = (np.arange(2**n)[:, None] >> np.arange(n) & 1).astype(bool)
    mine, rest = here @ np.array(host, float), ~here @ np.array(other, float)
    longest = np.maximum(mine, rest)
    # Sums in another order differ in their last bits.
    equal = longest <= longest.min() * (1 + 1e-12)
    best = np.flatnonzero(equal)[np.argmin((mine + rest)[equal])]
    return tuple(here[best].tolist())


def _solve(host: Sequence[float], other: Sequence[float]) -> tuple[bool, ...]:
    """As a mixed integer programme: lambda, in parts of what all would take on the better device, and a
    choice for each operation. HiGHS keeps its constraints to about a millionth."""
    from hetrun.planner.programme import Programme  # scipy: only where there is something to solve

    whole = min(sum(host), sum(other))
    if not whole:
        return (sum(host) == 0,) * len(host)
    programme = Programme()
    longest = programme.share(1.0)
    here = [programme.binary(0.0) for _ in host]
    programme.at_most({longest: -1.0} | {x: h / whole for x, h in zip(here, host, strict=True)}, 0.0)
    rest = {x: -o / whole for x, o in zip(here, other, strict=True)}
    programme.at_most({longest: -1.0} | rest, -sum(other) / whole)
    found = programme.solve(0.0, SOLVE_SECONDS)
    alone = (sum(host) <= sum(other),) * len(host)
    if found is None:
        return alone
    chosen = tuple(found[x] for x in here)
    return min(chosen, alone, key=lambda c: makespan(c, host, other))


# --- operations


@dataclass(frozen=True, slots=True)
class Operation:
    """One of the seven: its scopes in a graph and the form of its ops, under which it is measured."""

    name: str
    scopes: tuple[str, ...]
    ops: tuple[Op, ...]
    form: str


def operations(graph: Graph, layer: int) -> tuple[Operation, ...]:
    """The operations of a layer, in the order in which they run first."""
    members: dict[str, list[Op]] = {name: [] for name in dict.fromkeys(PARTS.values())}
    waiting: list[Op] = []  # norms, and what else belongs to its reader
    for op in graph.ops:
        if not in_scope(op.scope, f"blk.{layer}"):
            continue
        name = PARTS.get(op.scope.split(".")[-1])
        if name is None:
            waiting.append(op)
            continue
        members[name] += [*waiting, op]
        waiting = []
    if waiting or not any(members.values()):
        what = waiting[0].scope if waiting else f"blk.{layer}"
        raise OptionError(f"{what} is no part of the seven operations of a layer; place it by itself")
    return tuple(
        Operation(name, tuple(dict.fromkeys(op.scope for op in ops)), tuple(ops), form_of(ops))
        for name, ops in members.items()
        if ops
    )


def placements(found: Balance, of: Sequence[Operation], host: str, other: str) -> tuple[Placement, ...]:
    """A layer as it was balanced."""
    why = f"balanced: both devices are busy for {found.seconds * 1000:.3g} ms in this layer"
    return tuple(
        Placement(scope, host if here else other, why)
        for operation, here in zip(of, found.on_host, strict=True)
        for scope in operation.scopes
    )


# --- what things take


def work(operation: Operation, backend: str, batch: int, resident: bool = False) -> Work:
    """Where an operation's times are recorded; resident weights make it other work."""
    device = f"{backend}:{RESIDENT}" if resident else backend
    return Work(operation.form, device, threads=1, several=batch > 1)


@dataclass(frozen=True, slots=True)
class Link:
    """Between the host and the other device."""

    bytes_per_second: float
    latency: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """What so many bytes take."""
        return self.latency + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Migration:
    """What it costs to move a layer's score to the other side: its keys and values cross the link once, and
    pay for themselves over the steps until the plan is looked at again."""

    kv_bytes: int
    link: Link
    steps: int

    @property
    def seconds(self) -> float:
        """For each of those steps."""
        return self.link.seconds(self.kv_bytes) / self.steps


@dataclass(frozen=True, slots=True)
class Times:
    """What each operation of a layer takes on the host and on the other device."""

    host: tuple[float, ...]
    other: tuple[float, ...]

    def moved(self, score: int, was_on_host: bool, migration: Migration) -> Times:
        """With the price of moving the keys and values on the side where they are not."""
        more = migration.seconds
        side = self.other if was_on_host else self.host
        dearer = tuple(t + more * (i == score) for i, t in enumerate(side))
        return replace(self, other=dearer) if was_on_host else replace(self, host=dearer)

    def drifted(self, since: Times) -> float:
        """The largest change of a time, as a part of what it was."""
        pairs = zip((*self.host, *self.other), (*since.host, *since.other), strict=True)
        return max((abs(now - then) / max(then, 1e-9) for now, then in pairs), default=0.0)


@dataclass(frozen=True, slots=True)
class Replan:
    """One decision and why it was taken."""

    batch: int
    length: int
    reason: str
    found: Balance


class Balancer:
    """Decides for a layer when a batch or a length comes that it has not seen, or when times have changed."""

    def __init__(
        self,
        layer: Sequence[Operation],
        host: str,
        other: str,
        forecast: Forecast,
        resident: Mapping[str, bool] | None = None,
    ) -> None:
        """`resident`: the operations whose weights stay on the other device, by name."""
        self.layer = tuple(layer)
        self.replans: list[Replan] = []
        self._host, self._other = host, other
        self._forecast = forecast
        self._resident = resident or {}
        self._kept: dict[tuple[int, int], tuple[int, Times, Balance]] = {}  # and at which length
        self._score = next((i for i, o in enumerate(self.layer) if o.name == SCORE), None)
        self._score_on_host: bool | None = None  # unknown until something was decided

    def times(self, batch: int, length: int) -> Times:
        """What the records say of this batch and length."""
        host = [self._seconds(o, self._host, batch, length, False) for o in self.layer]
        other = [
            self._seconds(o, self._other, batch, length, self._resident.get(o.name, False))
            for o in self.layer
        ]
        return Times(tuple(host), tuple(other))

    def _seconds(self, o: Operation, backend: str, batch: int, length: int, resident: bool) -> float:
        found = self._forecast.seconds(work(o, backend, batch, resident), batch, length)
        if found is None:
            raise OptionError(f"{o.name} was never measured on {backend}; run it there before it is placed")
        return found

    def choose(self, batch: int, length: int, migration: Migration | None = None) -> Balance:
        """The assignment for a batch of sequences that have so many tokens each."""
        key = batch, length.bit_length()
        kept = self._kept.get(key)
        if kept and (drift := self.times(batch, kept[0]).drifted(kept[1])) <= DRIFT:
            return kept[2]
        times = self.times(batch, length)
        reason = f"a time changed by {drift:.0%}" if kept else "this batch and length are new"
        priced = times
        if migration and self._score is not None and self._score_on_host is not None:
            priced = times.moved(self._score, self._score_on_host, migration)
        found = balance(priced.host, priced.other)
        self._kept[key] = length, times, found
        if self._score is not None:
            self._score_on_host = found.on_host[self._score]
        self.replans.append(Replan(batch, length, reason, found))
        log.info(
            "balanced for batch %d and %d tokens (%s): %s on %s, %.3g ms a layer",
            batch, length, reason, self._names(found), self._host, found.seconds * 1000,
        )  # fmt: skip
        return found

    def _names(self, found: Balance) -> str:
        names = [o.name for o, here in zip(self.layer, found.on_host, strict=True) if here]
        return ", ".join(names) or "nothing"
