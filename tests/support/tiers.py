"""Which rows of a table `make test` runs, and which are left to `make test-all`.

A table of cases with several facts each (op, type, shape, backend) has more rows than kinds of faults: most
faults show with one fact, nearly all others with two of them together. So `make test` runs rows in which
every pair of facts that the table has occurs, and `make test-all` the table.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

T = TypeVar("T")
exhaustive = pytest.mark.exhaustive


def pairwise(rows: Iterable[T], facts: Callable[[T], Sequence[Hashable]]) -> list[T]:
    """Rows in which every pair of facts occurs: few of them, and the same in every run."""
    table = list(rows)
    pairs = [_pairs(facts(row)) for row in table]
    missing = set().union(*pairs)
    chosen: list[int] = []
    # A row never covers more than it did before, so the first that still covers what it says is the best.
    queue = [(-len(of_row), i) for i, of_row in enumerate(pairs)]
    heapq.heapify(queue)
    while missing:
        said, i = heapq.heappop(queue)
        now = -len(pairs[i] & missing)
        if now == said:
            missing -= pairs[i]
            chosen.append(i)
        elif now:
            heapq.heappush(queue, (now, i))
    return [table[i] for i in sorted(chosen)]


def _pairs(facts: Sequence[Hashable]) -> set[object]:
    """The pairs of a row, each with where its facts stand; of a single fact the fact."""
    placed = list(enumerate(facts))
    return set(combinations(placed, 2)) if len(placed) > 1 else set(placed)


def in_pairs(rows: Iterable[T], facts: Callable[[T], Sequence[Hashable]]) -> list[ParameterSet]:
    """Parameters for a test: those that pairs need, and the others marked for `make test-all`."""
    table = list(rows)
    chosen = {id(row) for row in pairwise(table, facts)}
    return [pytest.param(row, marks=() if id(row) in chosen else (exhaustive,)) for row in table]


def first(rows: Sequence[T], n: int = 1) -> list[ParameterSet]:
    """Parameters for a test of which `make test` needs the first ones only."""
    return [pytest.param(row, marks=(exhaustive,) if i >= n else ()) for i, row in enumerate(rows)]
