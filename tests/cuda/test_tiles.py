"""Experts of many tokens on the emulator: sorted pairs, tiles, and their products, against numpy."""

from __future__ import annotations

from ctypes import c_void_p

import numpy as np
import pytest

from hetrun.backend.conformance.random_weights import packed
from hetrun.backends.cuda import grouped_launch
from hetrun.backends.cuda.weights import READ
from hetrun.backends.reference.moe import gated
from hetrun.graph.quant import by_name
from tests.cuda.emulated.kernels import needs_compiler, run
from tests.support.tiers import first

pytestmark = [needs_compiler, pytest.mark.slow]  # every kernel is built
FIRST, HELD, EXPERTS = 2, 5, 8  # experts 2 to 6 of 8 are here
# Each type is a program of its own. What they differ by, test_matmul.py tries of all of them.
EVERYDAY = ["BF16", "Q4_0", "Q4_K", "Q8_0"]
QUANTS = first([*EVERYDAY, *sorted(set(READ) - set(EVERYDAY))], len(EVERYDAY))


def aligned(array: np.ndarray) -> np.ndarray:
    """The same numbers on a border of 64 bytes."""
    room = np.zeros(array.nbytes + 64, np.uint8)
    at = -room.ctypes.data % 64
    room[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
    return room[at : at + array.nbytes].view(array.dtype).reshape(array.shape)


def bf16(x: np.ndarray) -> np.ndarray:
    return by_name("BF16").quantise(x.astype(np.float32)).view(np.uint16).reshape(x.shape)


def numbers(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    return numbers(bf16(x))


def choices(tokens: int, used: int, seed: int = 0) -> np.ndarray:
    """Experts of tokens; the first experts are chosen more often, so that some have more than a tile."""
    rng = np.random.default_rng(seed)
    liked = rng.random((tokens, EXPERTS)) + np.linspace(0.8, 0, EXPERTS)
    return np.argsort(-liked, axis=1)[:, :used].astype(np.int32)


def grouped_pairs(chosen: np.ndarray, first: int, held: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    pairs = chosen.size
    order = np.full(pairs, -7, np.int32)
    tiles = np.zeros(grouped_launch.most_tiles(pairs, held), grouped_launch.TILE_DTYPE)
    run(grouped_launch.GROUPING, "group_pairs", grouped_launch.grouping_grid(held), grouped_launch.THREADS,
        chosen, first, held, pairs, order, tiles.view(np.uint8), len(tiles),
        shared=grouped_launch.grouping_shared(held), seed=seed)  # fmt: skip
    return order, tiles


@pytest.mark.parametrize("tokens", [1, 3, 64, 700, 2500])
@pytest.mark.parametrize(("first", "held"), [(0, EXPERTS), (FIRST, HELD), (7, 1), (9, 3)])
def test_pairs_are_sorted_by_expert(tokens: int, first: int, held: int) -> None:
    chosen = choices(tokens, 3)
    order, tiles = grouped_pairs(chosen, first, held)
    expert = chosen.reshape(-1) - first
    expert[(expert < 0) | (expert >= held)] = held
    assert (order == np.argsort(expert, kind="stable")).all()
    expected, begin = [], 0
    for e, count in enumerate(np.bincount(expert, minlength=held + 1)):
        expected += [
            (e, begin + a, min(grouped_launch.TILE, count - a), 0)
            for a in range(0, count, grouped_launch.TILE)
        ]
        begin += count
    assert [tuple(t) for t in tiles[: len(expected)].tolist()] == expected
    assert (tiles["expert"][len(expected) :] == -1).all()


def test_tiles_may_all_be_needed() -> None:
    held = 3
    counts = (129, 1, 257, 130)  # the last are of no expert that is held
    chosen = np.repeat(np.arange(held + 1, dtype=np.int32), counts)[:, None]
    _, tiles = grouped_pairs(np.random.default_rng(0).permutation(chosen), 0, held)
    assert tiles["expert"].tolist() == [0, 0, 1, 2, 2, 2, 3, 3]
    few, tiles = grouped_pairs(np.array([[2, 0]], np.int32), 0, held)
    assert tiles["expert"].tolist() == [0, 2]
    assert few.tolist() == [1, 0]


def stored(quant: str, rows: int, cols: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random weights of all experts as a file has them, and as a product takes them."""
    w = np.random.default_rng(seed).standard_normal((HELD * rows, cols), dtype=np.float32) * np.float32(
        1 / 16
    )
    raw = packed(w, by_name(quant))
    return aligned(raw), rounded(by_name(quant).dequantise(raw, cols)).reshape(HELD, rows, cols)


def check(quant: str, tokens: int, used: int, n_ff: int, width: int, clamped: bool = False) -> None:
    """Both products against numpy, which rounds what they round."""
    (gate, g), (up, u) = (stored(quant, n_ff, width, seed) for seed in (0, 1))
    down, d = stored(quant, width, n_ff, 2)
    rng = np.random.default_rng(3)
    x = aligned(bf16(rng.standard_normal((tokens, width))))
    shares = rng.random((tokens, used), dtype=np.float32)
    chosen = choices(tokens, used, seed=4)
    pairs = tokens * used
    order, tiles = grouped_pairs(chosen, FIRST, HELD)
    inner = aligned(np.full((pairs, n_ff), 0x7FC0, np.uint16))
    y = aligned(np.full((pairs, width), np.nan, np.float32))
    told = order, tiles.view(np.uint8), HELD
    biases = [rng.standard_normal((HELD, n), dtype=np.float32) for n in (n_ff, n_ff, width)]
    given = [aligned(b) for b in biases] if clamped else [c_void_p(0)] * 3
    source, threads, shared = grouped_launch.source(quant), grouped_launch.THREADS, grouped_launch.SHARED
    act = 3 if clamped else 0
    run(source, "experts_gated_many", grouped_launch.gated_grid(pairs, HELD, n_ff), threads,
        gate, up, *given[:2], *told, inner, x, n_ff, width, used, act, shared=shared)  # fmt: skip
    run(source, "experts_down_many", grouped_launch.down_grid(pairs, HELD, width), threads,
        down, given[2], *told, shares, y, inner, width, n_ff, shared=shared)  # fmt: skip
    for place, pair in enumerate(order):
        e = chosen.reshape(-1)[pair] - FIRST
        if not 0 <= e < HELD:
            assert not y[pair].any()
            continue
        mine = numbers(x[pair // used])
        one, other, last = (b[e] if clamped else 0 for b in biases)
        right = gated("clamped" if clamped else "silu", g[e] @ mine + one, u[e] @ mine + other)
        found = numbers(inner[place])
        # Half a step of bf16, and sums in another order.
        assert (np.abs(found - right) <= 2**-8 * np.abs(right) + 2e-5 * np.abs(right).max()).all()
        right = shares.reshape(-1)[pair] * (d[e] @ found + last)
        assert np.abs(y[pair] - right).max() <= 1e-5 * np.abs(right).max()


@pytest.mark.parametrize("quant", QUANTS)
def test_products_of_tiles(quant: str) -> None:
    # Rows of weights that end inside a block of the grid, and tiles of more, and of fewer, than 64 pairs.
    check(quant, tokens=90, used=2, n_ff=256, width=512)


@pytest.mark.parametrize(("n_ff", "width"), [(8, 24), (40, 136), (72, 200)])
def test_rows_that_end_anywhere(n_ff: int, width: int) -> None:
    check("BF16", tokens=20, used=3, n_ff=n_ff, width=width)


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0"])
def test_slabs_that_are_half_empty(quant: str) -> None:
    check(quant, tokens=20, used=3, n_ff=96, width=160)


def test_experts_with_biases() -> None:
    check("MXFP4", tokens=90, used=2, n_ff=256, width=160, clamped=True)


def test_an_expert_of_several_tiles() -> None:
    check("Q8_0", tokens=400, used=2, n_ff=32, width=64)
