"""Device memory given out in parts: they never overlap, and what was given back can be taken again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from hetrun.backends.cuda.arena import ALIGNMENT, DeviceArena, GrowingArena
from hetrun.errors import BudgetError

BASE, SIZE = 1 << 20, 64 * ALIGNMENT
Steps = list[tuple[bool, int]]
STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 20 * ALIGNMENT)), max_size=60)


def taken(
    arena: DeviceArena | GrowingArena, held: dict[int, int], steps: Steps
) -> Iterator[tuple[int | None, int]]:
    """Gives parts of what is held back, or takes new ones: their addresses, or None where none fits."""
    for give, nbytes in steps:
        if give and held:
            address = sorted(held)[nbytes % len(held)]
            arena.give(address)
            del held[address]
            continue
        try:
            yield arena.take(nbytes, "a test"), nbytes
        except BudgetError:
            yield None, nbytes


@given(STEPS)
def test_parts_lie_inside_and_apart(steps: Steps) -> None:
    arena, held = DeviceArena(BASE, SIZE + 7), dict[int, int]()
    for address, nbytes in taken(arena, held, steps):
        if address is None:
            assert nbytes > _largest_gap(held)
            continue
        assert address % ALIGNMENT == 0
        assert BASE <= address <= BASE + SIZE - nbytes
        assert all(address + nbytes <= a or a + n <= address for a, n in held.items())
        held[address] = nbytes
    assert arena.used == sum(_whole(n) for n in held.values())
    for address in held:
        arena.give(address)
    assert arena.take(SIZE, "everything") == BASE


def _whole(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _largest_gap(held: dict[int, int]) -> int:
    ends = [BASE, *(a + _whole(n) for a, n in sorted(held.items()))]
    begins = [*sorted(held), BASE + SIZE]
    return max(b - e for b, e in zip(begins, ends, strict=True))


def test_who_asks_for_too_much_is_told_what_is_left() -> None:
    arena = DeviceArena(BASE, SIZE)
    arena.take(SIZE // 2, "some")
    with pytest.raises(
        BudgetError, match=r"no room in GPU memory for a cat: .* left; grant more with --vram"
    ):
        arena.take(SIZE, "a cat")
    assert arena.most_used == SIZE // 2


STEP = 16 * ALIGNMENT


class Others:
    """A device's memory, of which others take some."""

    def __init__(self, free: int) -> None:
        self.free, self.at = free, BASE

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.free:
            raise MemoryError
        self.free -= nbytes
        # Neighbours or not: what lies behind the end of one piece is no part of it.
        self.at, begin = self.at + nbytes + ALIGNMENT * (nbytes % 3), self.at
        return begin


@given(STEPS)
def test_parts_of_several_pieces_lie_apart_and_within_what_may_be_taken(steps: Steps) -> None:
    others, held = Others(10 * SIZE), dict[int, int]()
    arena = GrowingArena(others.allocate, SIZE, STEP)
    assert arena.taken == STEP
    for address, nbytes in taken(arena, held, steps):
        if address is None:
            assert arena.taken + _whole(nbytes) > SIZE
            continue
        assert all(address + nbytes <= a or a + n <= address for a, n in held.items())
        held[address] = nbytes
    assert arena.used == sum(map(_whole, held.values())) <= arena.taken <= SIZE
    assert arena.left == SIZE - arena.used
    assert 10 * SIZE - others.free == arena.taken
    for address in held:
        arena.give(address)
    assert arena.used == 0


def test_a_piece_is_no_larger_than_what_is_left_and_no_smaller_than_a_part() -> None:
    others = Others(10 * SIZE)
    arena = GrowingArena(others.allocate, SIZE, STEP)
    arena.take(3 * STEP, "a large part")
    assert arena.taken == 4 * STEP == SIZE
    arena.take(STEP, "the rest")
    with pytest.raises(BudgetError, match="no room in GPU memory for a cat"):
        arena.take(1, "a cat")


def test_what_others_have_taken_is_not_asked_for_again() -> None:
    others = Others(STEP + STEP // 2)
    arena = GrowingArena(others.allocate, SIZE, STEP)
    arena.take(STEP, "all there is")
    arena.take(STEP // 4, "a part of what others have left, with which it makes do")
    with pytest.raises(BudgetError):
        arena.take(STEP, "more")
    assert arena.nbytes == arena.taken == STEP + STEP // 4
