"""Who runs in the next step."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count, pairwise

import pytest
from hypothesis import given, strategies as st

from hetrun.engine.scheduler import Shares, last_in_line, share_out, split


@dataclass(eq=False)
class Text:
    """A sequence with tokens that the model has not seen."""

    name: str
    missing: int
    turn: int = 0
    most: int = 1000
    least: int = 1
    client: str = ""
    priority: int = 0
    arrived: float = 0
    served: list[int] = field(default_factory=list)


def texts(*missing: int) -> list[Text]:
    return [Text(str(i), n) for i, n in enumerate(missing)]


def schedule(sequences: list[Text], budget: int) -> list[tuple[Text, int]]:
    return share_out(*split(sequences), budget)


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


# --- fairness


def asking(client: str, arrived: float, priority: int = 0) -> Text:
    return Text(f"{client}{arrived}", 1, client=client, priority=priority, arrived=arrived)


def test_whoever_was_given_least_goes_first_and_then_whoever_came_first() -> None:
    shares = Shares()
    a1, a2, b1, c1 = asking("a", 1), asking("a", 2), asking("b", 3), asking("c", 4, priority=-1)
    for r in (a1, a2, b1, c1):
        shares.came(r.client)
    shares.gave("a", 5)
    shares.gave("c", 50)
    assert shares.ordered([a1, a2, b1, c1]) == [c1, b1, a1, a2]


def test_a_client_that_comes_begins_with_the_least_of_those_that_are_here() -> None:
    shares = Shares()
    shares.came("a")
    shares.came("b")
    shares.gave("a", 1000)
    shares.gave("b", 600)
    shares.came("new")
    shares.gave("new", 1)
    a, b, new = asking("a", 1), asking("b", 2), asking("new", 3)
    assert shares.ordered([a, b, new]) == [b, new, a]
    shares.left("b")
    shares.came("b")  # it comes back, and what it was given is forgotten
    assert shares.ordered([a, b, new]) == [b, new, a]
    shares.gave("b", 2)
    assert shares.ordered([a, b, new]) == [new, b, a]


@given(
    sizes=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 300)), min_size=1, max_size=20),
    budget=st.integers(1, 64),
)
def test_clients_that_have_work_are_never_further_apart_than_a_step(
    sizes: list[tuple[str, int]], budget: int
) -> None:
    """However many requests each has, and however long they are."""
    shares, given_to = Shares(), dict.fromkeys("abc", 0)
    left = [Text(str(i), n, client=c, arrived=i) for i, (c, n) in enumerate(sizes)]
    for t in left:
        shares.came(t.client)
    while len({t.client for t in left}) == len({c for c, _ in sizes}):
        for t, n in share_out((), shares.ordered(left), budget):
            t.missing -= n
            shares.gave(t.client, n)
            given_to[t.client] += n
        left = [t for t in left if t.missing]
        amounts = [given_to[t.client] for t in left]
        assert max(amounts, default=0) - min(amounts, default=0) <= budget


def test_the_youngest_of_the_least_urgent_gives_way() -> None:
    old, young, urgent = asking("a", 1), asking("b", 2), asking("c", 3, priority=-1)
    assert last_in_line([old, urgent, young]) is young
    assert last_in_line([]) is None


def test_tokens_that_are_needed_together() -> None:
    """They are given all at once, if the step has room for any more; one without room for them waits."""
    answer, picture, text = Text("a", 1), Text("b", 40, most=20, least=20), Text("c", 30)
    assert [n for _, n in share_out([answer], [picture, text], 16)] == [1, 20]
    assert [n for _, n in share_out([answer], [text, picture], 64)] == [1, 30, 20]
    assert [(s.name, n) for s, n in share_out([answer], [text, picture], 31)] == [("a", 1), ("c", 30)]
