"""The exact parts of the planner, against brute force."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from hetrun.errors import BudgetError
from hetrun.planner import residency
from hetrun.planner.residency import BucketDemand, BucketPlacement, Copies, Copy, cost, place_all
from hetrun.planner.shortest_path import Chain

NAMES = ("a", "b", "c")
seconds = st.integers(1, 60).map(lambda n: n / 8)  # sums of these are exact


@st.composite
def chains(draw: st.DrawFn, n: int, names: tuple[str, ...] = NAMES) -> Chain:
    times = [{b: draw(seconds) for b in names} for _ in range(n)]
    calls = {b: draw(st.sampled_from([0.0, 0.125, 1.0])) for b in names}
    return Chain(tuple(times), calls)


@given(st.data(), st.integers(1, 7))
def test_a_chain_is_placed_as_by_brute_force(data: st.DataObject, n: int) -> None:
    chain = data.draw(chains(n, NAMES[:2] if n == 7 else NAMES))
    every = product(*(times for times in chain.times))
    assert chain.seconds(chain.best()) == min(chain.seconds(way) for way in every)


def test_among_equals_the_chain_changes_least() -> None:
    chain = Chain(({"a": 1, "b": 1}, {"a": 1, "b": 1}, {"a": 1}), {})
    assert chain.best() == ("a", "a", "a")


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[BucketDemand], Copies]:
    n, names = draw(st.integers(1, 3)), NAMES[: draw(st.integers(2, 3))]
    demands = [
        BucketDemand(draw(st.sampled_from([1.0, 8.0])), {t: draw(chains(n, names)) for t in (1, 2)})
        for _ in range(draw(st.integers(1, 2)))
    ]
    nbytes = {(i, b): draw(st.integers(1, 9)) for i in range(n) for b in names}
    fixed = {b: draw(st.sampled_from([0, 3])) for b in names}
    room = draw(st.integers(1, 40))
    if not draw(st.booleans()):
        return demands, Copies(nbytes, fixed, room)
    own_bytes = {c: draw(st.integers(0, 9)) if c[1] == names[1] else 0 for c in nbytes}
    return demands, Copies(nbytes, fixed, room, own_bytes, {names[1]: draw(st.integers(0, 20))})


def brute_force(demands: list[BucketDemand], copies: Copies) -> float | None:
    """Every combination of every bucket's placements, and what it would have to hold."""
    ways = [
        [(t, way) for t, chain in d.ways.items() for way in product(*(times for times in chain.times))]
        for d in demands
    ]
    found = []
    for chosen in product(*ways):
        held = frozenset((i, b) for _, way in chosen for i, b in enumerate(way))
        if copies.fit(held):
            found.append(
                sum(d.weight * d.ways[t].seconds(way) for d, (t, way) in zip(demands, chosen, strict=True))
            )
    return min(found, default=None)


def held_by(placed: list[BucketPlacement]) -> frozenset[Copy]:
    return frozenset((i, b) for p in placed for i, b in enumerate(p.backends))


@settings(max_examples=60)
@given(problems(), st.booleans())
def test_copies_are_held_as_by_brute_force(
    problem: tuple[list[BucketDemand], Copies], enumerated: bool
) -> None:
    demands, copies = problem
    best = brute_force(demands, copies)
    with pytest.MonkeyPatch.context() as patch:
        if not enumerated:
            patch.setattr(residency, "MOST_ENUMERATED", 0)  # HiGHS decides
            patch.setattr(residency, "LONGEST_S", 60.0)  # however busy this machine is
        if best is None:
            with pytest.raises(BudgetError, match="at least"):
                place_all(demands, copies)
            return
        placed = place_all(demands, copies)
    assert cost(demands, placed) == pytest.approx(best, rel=residency.GAP)
    assert copies.total(held_by(placed)) <= copies.room
    for b, own_room in copies.own_room.items():
        assert sum(copies.own_bytes[c] for c in held_by(placed) if c[1] == b) <= own_room
