"""How attention's query rows are laid out for ggml."""

from __future__ import annotations

from hypothesis import given, strategies as st

from hetrun.backends.llamacpp.attention_layout import MOST_ROWS, TILE, TILE_COST, HeadLayout, layout, tiles


def test_few_rows_become_a_tile_of_each_kv_head() -> None:
    assert layout(32, 32, 8, 1, TILE_COST) == HeadLayout(4, 128)
    assert layout(12, 32, 8, 1, TILE_COST) == HeadLayout(4, TILE)  # 48 rows, and zeros
    assert layout(40, 32, 32, 1, TILE_COST) == HeadLayout(1, TILE)


def test_what_is_fast_stays_as_it_is() -> None:
    assert layout(1, 32, 8, 2, TILE_COST) == HeadLayout(1, 1)  # a token of an answer
    assert layout(2, 32, 32, 2, TILE_COST) == HeadLayout(1, 2)
    assert layout(64, 32, 8, 2, TILE_COST) == HeadLayout(1, 64)
    assert layout(512, 32, 8, 2, TILE_COST) == HeadLayout(1, 512)
    # 64 threads would get a few rows of a tile each.
    assert layout(16, 32, 8, 64, TILE_COST) == HeadLayout(1, 16)


@given(st.integers(1, 600), st.integers(1, 8), st.integers(1, 8), st.integers(1, 64))
def test_a_layout_has_room_for_every_row(n: int, group: int, kv_heads: int, threads: int) -> None:
    made = layout(n, group * kv_heads, kv_heads, threads, TILE_COST)
    assert made.together in (1, group)
    assert made == HeadLayout(1, n) or n * made.together <= made.rows <= MOST_ROWS


@given(st.integers(TILE, 300), st.integers(1, 40), st.integers(1, 20))
def test_tiles_reach_neither_into_another_head_nor_into_another_run(
    rows: int, heads: int, threads: int
) -> None:
    alone = -(-rows // TILE) * heads
    assert alone == tiles(rows, heads, 1)
    assert alone <= tiles(rows, heads, threads) <= alone + 4 * threads
