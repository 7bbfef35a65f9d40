"""Who runs in the next step."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun.scheduler import schedule


@dataclass(eq=False)
class Text:
    """A sequence with tokens that the model has not seen."""

    name: str
    missing: int
    turn: int = 0
    most: int = 1000
    served: list[int] = field(default_factory=list)


def texts(*missing: int) -> list[Text]:
    return [Text(str(i), n) for i, n in enumerate(missing)]


@pytest.mark.parametrize(
    ("missing", "budget", "chosen"),
    [
        ((), 8, []),
        ((1,), 8, [("0", 1)]),
        ((5,), 8, [("0", 5)]),
        ((20,), 8, [("0", 8)]),
        ((20, 1, 1), 8, [("1", 1), ("2", 1), ("0", 6)]),  # answers are not stopped by a long prompt
        ((3, 4, 5), 8, [("0", 3), ("1", 4), ("2", 1)]),  # the oldest prompt first
        ((8, 4), 8, [("0", 8)]),
        ((1, 1, 1), 2, [("0", 1), ("1", 1)]),
        ((1, 1, 9), 2, [("0", 1), ("1", 1)]),
        ((0, 1), 8, [("1", 1)]),
    ],
)
def test_a_step(missing: tuple[int, ...], budget: int, chosen: list[tuple[str, int]]) -> None:
    assert [(s.name, n) for s, n in schedule(texts(*missing), budget)] == chosen


@given(missing=st.lists(st.integers(0, 40), max_size=16), budget=st.integers(1, 64))
def test_a_step_is_as_full_as_it_can_be(missing: list[int], budget: int) -> None:
    sequences = texts(*missing)
    chosen = schedule(sequences, budget)
    assert len({s.name for s, _ in chosen}) == len(chosen)
    assert all(0 < n <= s.missing for s, n in chosen)
    total = sum(n for _, n in chosen)
    assert total <= budget
    few = len([m for m in missing if m == 1]) + any(m > 1 for m in missing) > budget
    assert total == (budget if few else min(budget, sum(missing)))


@given(missing=st.lists(st.integers(1, 8), min_size=1, max_size=8), budget=st.integers(1, 10))
def test_nobody_waits_for_ever(missing: list[int], budget: int) -> None:
    """Everybody answers for as long as we look, so there are more and more answers beside the prompts."""
    sequences = texts(*missing)
    longest = -(-len(sequences) // budget)  # steps until everybody had a turn
    turns = count(1)
    for step in range(1, (sum(missing) + 1) * longest + 1):
        for s, n in schedule(sequences, budget):
            s.missing = max(s.missing - n, 1)
            s.turn = next(turns)
            s.served.append(step)
    assert all(s.missing == 1 for s in sequences), "a prompt was not read to its end"
    for s, n in zip(sequences, missing, strict=True):
        gaps = [b - a for a, b in pairwise([0, *s.served])]
        assert max(gaps[-1:] if n > 1 else gaps) <= longest


def test_a_sequence_that_takes_few_at_a_time_leaves_room_for_others() -> None:
    first, second = Text("a", 100, most=3), Text("b", 100)
    assert schedule([first, second], 10) == [(first, 3), (second, 7)]
