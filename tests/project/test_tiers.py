"""What decides which tests run: pairs of facts, phases of a tier, and pytest's closing line."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given, strategies as st

from tests import run
from tests.support.tiers import exhaustive, first, in_pairs, pairwise

ROWS = list(product("abcd", range(5), ("x", "y", "z")))


def pairs(rows: list[tuple[object, ...]]) -> set[object]:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def test_every_pair_of_facts_is_in_the_chosen_rows() -> None:
    chosen = pairwise(ROWS, lambda row: row)
    assert pairs(list(chosen)) == pairs(list(ROWS))
    # Two facts with four and five values have twenty pairs, each in a row of its own.
    assert 20 <= len(chosen) < len(ROWS) / 2
    assert chosen == sorted(chosen, key=ROWS.index)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=40))
def test_pairs_of_any_table(rows: list[tuple[object, ...]]) -> None:
    chosen = pairwise(rows, lambda row: row)
    assert pairs(chosen) == pairs(rows)
    assert len(chosen) == len(set(chosen))


def test_a_single_fact_is_covered_once() -> None:
    assert pairwise([3, 1, 3, 2, 1], lambda n: (n,)) == [3, 1, 2]
    assert pairwise([], lambda n: (n,)) == []


def test_the_other_rows_are_kept_for_test_all() -> None:
    chosen = pairwise(ROWS, lambda row: row)
    parameters = in_pairs(ROWS, lambda row: row)
    assert [p.values[0] for p in parameters] == ROWS
    assert [p.values[0] for p in parameters if not p.marks] == chosen
    assert {mark.name for p in parameters for mark in p.marks} == {exhaustive.name}


def test_the_first_rows_of_a_list() -> None:
    assert [(p.values[0], bool(p.marks)) for p in first("abc", 2)] == [
        ("a", False),
        ("b", False),
        ("c", True),
    ]


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("3 failed, 120 passed, 2 skipped in 3.20s", {"failed": 3, "passed": 120, "skipped": 2}),
        ("======= 7 passed, 1 error in 0.51s =======", {"passed": 7, "error": 1}),
        ("1 failed, 2 passed, 2 errors in 61.0s (0:01:01)", {"failed": 1, "passed": 2, "error": 2}),
        ("2 passed the exam", {}),
        ("SKIPPED [1] tests/x.py:3: none in here", {}),
    ],
)  # fmt: skip
def test_the_closing_line_is_counted(line: str, counts: dict[str, int]) -> None:
    assert run.counted(line) == Counter(counts)


def test_no_test_is_in_two_phases_or_in_none() -> None:
    (each_once,) = run.phases("test")
    assert each_once.select == "not exhaustive"
    assert each_once.workers >= 2
    side_by_side, alone = run.phases("all")
    assert (side_by_side.select, alone.select) == ("not alone", "alone")
    assert (side_by_side.workers >= 2, alone.workers) == (True, 0)
    (quick,) = run.phases("quick")
    assert quick.paths == ("tests/unit",)


@pytest.mark.alone
def test_what_must_be_alone_is_for_the_long_run(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("exhaustive")
