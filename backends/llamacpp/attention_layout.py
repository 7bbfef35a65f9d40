"""How the query rows of an attention are laid out, so that ggml computes them the fast way.

For several rows ggml has two ways. With 64 rows or more of each head it computes tiles, 64 rows by 64 keys
at a time. With fewer, each row goes through all keys by itself: 63 rows may take ten times as long as 64.
A tile takes the same time however many of its rows mean anything. So where it pays, few rows are made into
tiles: query heads that read the same keys become one head with all their rows, and zeros fill it up.

Where our own kernel was built for wide vectors (`decode_attention.py`) it takes all of them, and nothing
comes here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

TILE = 64
RUNS_PER_THREAD = 4  # of the rows of all heads: ggml cuts them so, and no tile reaches into the next run
# A tile's time in single rows: measured as 15 to 22, and as 5 to 9 where a row's time goes into what is left
# over when a head is taken in steps.
TILE_COST = 16
TILE_COST_LEFT_OVER = 8
MOST_ROWS = 512  # of one head: each has a row of the mask, as long as the context
WORTH = 0.75  # copying takes time too: at most so much of the time must be left


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Query heads that are laid together, and the rows of each head made of them, zeros included."""

    together: int
    rows: int


@cache
def layout(n: int, heads: int, kv_heads: int, threads: int, tile_cost: int) -> HeadLayout:
    """How to lay out `n` rows of each head, where keys and values are of a type that tiles can read."""
    given = HeadLayout(1, n)
    if n == 1:  # the threads share a single row by its keys
        return given
    others = [HeadLayout(g, max(n * g, TILE)) for g in (1, heads // kv_heads) if n * g <= MOST_ROWS]
    cost = {made: _cost(made, heads, threads, tile_cost) for made in (given, *others)}
    best = min(cost, key=cost.__getitem__)
    return best if cost[best] <= WORTH * cost[given] else given


def _cost(made: HeadLayout, heads: int, threads: int, tile_cost: int) -> int:
    """The time of a layout, in single rows."""
    heads //= made.together
    if made.rows < TILE:
        return made.rows * heads
    return tiles(made.rows, heads, threads) * tile_cost


def tiles(rows: int, heads: int, threads: int) -> int:
    """How many tiles ggml makes of heads with 64 rows or more: none reaches into another head or run."""
    total = rows * heads
    run = -(-total // (RUNS_PER_THREAD * threads))
    if threads == 1 or -(-total // run) < threads:
        run = -(-total // threads)
    edges = sorted({*range(0, total, rows), *range(0, total, run), total})
    return sum(-(-(b - a) // TILE) for a, b in pairwise(edges))
