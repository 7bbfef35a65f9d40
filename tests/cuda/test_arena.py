"""Device memory given out in parts: they never overlap, and what was given back can be taken again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun.backends.cuda.arena import ALIGNMENT, Arena
from hetrun.errors import BudgetError

BASE, SIZE = 1 << 20, 64 * ALIGNMENT


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20 * ALIGNMENT)), max_size=60))
def test_parts_lie_inside_and_apart(steps: list[tuple[bool, int]]) -> None:
    arena, held = Arena(BASE, SIZE + 7), dict[int, int]()
    for give, nbytes in steps:
        if give and held:
            address = sorted(held)[nbytes % len(held)]
            arena.give(address)
            del held[address]
            continue
        try:
            address = arena.take(nbytes, "a test")
        except BudgetError:
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
    arena = Arena(BASE, SIZE)
    arena.take(SIZE // 2, "some")
    with pytest.raises(
        BudgetError, match=r"no room in GPU memory for a cat: .* left; grant more with --vram"
    ):
        arena.take(SIZE, "a cat")
    assert arena.most_used == SIZE // 2
