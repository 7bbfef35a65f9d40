"""Two devices on one layer: which of its operations each one takes, so that both are done as early as can be.

This is the programme of TwinPilots (Yu et al., SYSTOR 2024). A layer is seven operations: the projections
to q, k and v, the attention over what was seen (score), the projection after it (out), and the two halves of
the feed-forward part (mlp1, mlp2). The host computes its operations in place; the other device has to bring
weights or keys and values over a link first, and does that ahead of time. So two sums count, whatever waits
for what: find the assignment whose larger sum, lambda, is least.

What the other device computes once its weights are there is a third number: the operations of one sequence
follow each other, so the host waits meanwhile. It counts beside the host's own sum. Where it is nothing, the
programme is the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetrun.errors import OptionError
from hetrun.graph import Graph, Op, in_scope
from hetrun.graph.signature import form_of
from hetrun.planner.plan import Placement

ENUMERATED = 16  # operations; with more there are too many assignments to look at each
SOLVE_SECONDS = 10.0
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


def balance(
    host: Sequence[float], other: Sequence[float], between: Sequence[float] | None = None, rest: float = 0.0
) -> Balance:
    """The assignment with the least makespan, exactly; `host` and `other`: what each operation takes there.

    `between` is what the host waits for each operation of the other device besides, `rest` what it does in
    any case. Among equally good assignments the enumeration takes the one with the least work in all.
    """
    between = between or [0.0] * len(host)
    if not len(host) == len(other) == len(between):
        raise ValueError(f"{len(host)} times on the host and {len(other)} on the other device")
    times = [*host, *other, *between, rest]
    if not np.isfinite(times).all() or min(times) < 0:
        raise ValueError(
            "times must be numbers of 0 or more; an operation has to be measured before it is placed"
        )
    solve = _enumerate if len(host) <= ENUMERATED else _solve
    chosen = solve(host, other, between, rest)
    return Balance(chosen, makespan(chosen, host, other, between, rest))


def makespan(
    on_host: Sequence[bool],
    host: Sequence[float],
    other: Sequence[float],
    between: Sequence[float] | None = None,
    rest: float = 0.0,
) -> float:
    """How long the busier of the two is busy."""
    waits = between or [0.0] * len(host)
    mine = rest + sum(h if here else w for h, w, here in zip(host, waits, on_host, strict=True))
    theirs = sum(o for o, here in zip(other, on_host, strict=True) if not here)
    return float(max(mine, theirs))


def _enumerate(
    host: Sequence[float], other: Sequence[float], between: Sequence[float], rest: float
) -> tuple[bool, ...]:
    """Every assignment."""
    n = len(host)
    here = (np.arange(2**n)[:, None] >> np.arange(n) & 1).astype(bool)
    mine = rest + here @ np.array(host, float) + ~here @ np.array(between, float)
    theirs = ~here @ np.array(other, float)
    longest = np.maximum(mine, theirs)
    # Sums in another order differ in their last bits.
    equal = longest <= longest.min() * (1 + 1e-12)
    best = np.flatnonzero(equal)[np.argmin((mine + theirs)[equal])]
    return tuple(here[best].tolist())


def _solve(
    host: Sequence[float], other: Sequence[float], between: Sequence[float], rest: float
) -> tuple[bool, ...]:
    """As a mixed integer programme: lambda, in parts of what all would take on the better device, and a
    choice for each operation. HiGHS keeps its constraints to about a millionth."""
    from hetrun.planner.milp import Programme  # on use: it imports HiGHS

    all_here, all_there = (True,) * len(host), (False,) * len(host)
    alone = min(all_here, all_there, key=lambda c: makespan(c, host, other, between, rest))
    whole = makespan(alone, host, other, between, rest)
    if not whole:
        return alone
    programme = Programme()
    longest = programme.share(1.0)
    here = [programme.binary(0.0) for _ in host]
    mine = {x: (h - w) / whole for x, h, w in zip(here, host, between, strict=True)}
    programme.at_most({longest: -1.0} | mine, -(rest + sum(between)) / whole)
    theirs = {x: -o / whole for x, o in zip(here, other, strict=True)}
    programme.at_most({longest: -1.0} | theirs, -sum(other) / whole)
    found = programme.solve(0.0, SOLVE_SECONDS)
    if found is None:
        return alone
    chosen = tuple(found[x] for x in here)
    return min(chosen, alone, key=lambda c: makespan(c, host, other, between, rest))


# --- operations


@dataclass(frozen=True, slots=True)
class OpGroup:
    """One of the seven: its scopes in a graph and the form of its ops, under which it is measured."""

    name: str
    scopes: tuple[str, ...]
    ops: tuple[Op, ...]
    form: str


def operations(graph: Graph, layer: int) -> tuple[OpGroup, ...]:
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
        raise OptionError(f"{what} is not one of the seven operations of a layer; place it separately")
    return tuple(
        OpGroup(name, tuple(dict.fromkeys(op.scope for op in ops)), tuple(ops), form_of(ops))
        for name, ops in members.items()
        if ops
    )


def placements(found: Balance, of: Sequence[OpGroup], host: str, other: str) -> tuple[Placement, ...]:
    """A layer as it was balanced."""
    why = f"balanced: this layer takes {found.seconds * 1000:.3g} ms on both devices together"
    return tuple(
        Placement(scope, host if here else other, why)
        for operation, here in zip(of, found.on_host, strict=True)
        for scope in operation.scopes
    )


# --- the link


@dataclass(frozen=True, slots=True)
class HostLink:
    """Between the host and the other device."""

    bytes_per_second: float
    latency: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Seconds that `nbytes` bytes take."""
        return self.latency + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Migration:
    """What it costs to move scores to the other side: their keys and values cross the link once, and have to
    pay for themselves within some steps."""

    kv_bytes: float
    link: HostLink
    steps: float

    @property
    def seconds(self) -> float:
        """For each of those steps."""
        return self.link.seconds(self.kv_bytes) / self.steps if self.kv_bytes else 0.0
