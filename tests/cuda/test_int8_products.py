"""Products of many tokens in bytes on the emulator: each type of weights, against numpy."""

from __future__ import annotations

from ctypes import c_void_p
from dataclasses import dataclass

import numpy as np
import pytest

from hetrun.backend.conformance.random_weights import packed
from hetrun.backends.cuda.int8 import launch as int8
from hetrun.backends.cuda.int8.launch import Input
from hetrun.backends.cuda.matmul_launch import MatmulOutput
from hetrun.graph.quant import by_name
from tests.cuda import test_int8
from tests.cuda.emulated.kernels import needs_compiler, run
from tests.cuda.test_matmul import activated, any_bytes, output
from tests.cuda.test_tiles import aligned
from tests.support.tiers import first

pytestmark = [needs_compiler, pytest.mark.slow]  # every kernel is built
# Each type is a program of its own. These have minima, runs of two scales, nibbles, and bytes as they are.
EVERYDAY = ["Q4_K", "Q6_K", "Q4_0", "Q8_0"]
EACH = first([*EVERYDAY, *sorted(int8.TYPES - set(EVERYDAY))], len(EVERYDAY))
CLOSE = 2e-6  # sums in float32, of what is multiplied exactly


@dataclass
class Rounded:
    """Rows as kernels have them, and as numbers."""

    rows: np.ndarray
    numbers: np.ndarray

    @property
    def given(self) -> Input:
        return Input(self.rows.ctypes.data, *self.numbers.shape)


def rounded(x: np.ndarray) -> Rounded:
    rows, numbers = test_int8.rounded(aligned(x))
    return Rounded(rows, numbers.astype(np.float64))


def inputs(tokens: int, cols: int, seed: int = 1) -> np.ndarray:
    """Runs of different sizes, so that a wrong scale shows."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.standard_normal((tokens, cols // 32, 1)))
    x: np.ndarray = (sizes * rng.standard_normal((tokens, cols // 32, 32))).reshape(tokens, cols)
    return x.astype(np.float32)


def stored(quant: str, rows: int, cols: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)
    raw = packed(numbers, by_name(quant))
    return aligned(raw), by_name(quant).dequantise(raw, cols).astype(np.float64)


def products(quant: str, x: Rounded, *outputs: MatmulOutput, size: int = 64) -> None:
    three = (*outputs, MatmulOutput(), MatmulOutput())[:3]
    grid = (int8.blocks(size, len(x.rows), *(int(o.rows) for o in outputs)),)
    source, threads, shared = int8.source(quant), int8.threads(size), int8.shared(size)
    run(source, f"products_{size}", grid, threads, *three, x.given, shared=shared)


def close(found: np.ndarray, right: np.ndarray, part: float = CLOSE) -> None:
    assert np.abs(found - right).max() <= part * np.abs(right).max()


def test_what_is_not_a_number_is_seen_in_its_row_only() -> None:
    x = inputs(3, 128)
    x[1, 70] = np.nan
    raw, _ = stored("Q8_0", 8, 128)
    y = np.zeros((3, 8), np.float32)
    products("Q8_0", rounded(x), output(raw, y))
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("quant", EACH)
def test_products(quant: str) -> None:
    # Fewer tokens, and rows of weights, than a block has room for, and some more than that.
    for tokens, rows, cols in ((5, 10, 256), (70, 67, 512)):
        raw, w = stored(quant, rows, cols)
        x, y = rounded(inputs(tokens, cols)), np.full((tokens, rows), np.nan, np.float32)
        products(quant, x, output(raw, y))
        close(y, x.numbers @ w.T)


@pytest.mark.parametrize("quant", EACH)
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")
def test_weights_are_what_the_file_says(quant: str) -> None:
    """Every bit of a block counts: columns one by one, as products with rows that have a single number."""
    rows, cols = 9, 256
    raw = any_bytes(quant, rows, cols)
    w = by_name(quant).dequantise(raw, cols)
    for begin in (0, 64, 128, 192):
        x, y = np.zeros((64, cols), np.float32), np.zeros((64, rows), np.float32)
        x[np.arange(64), begin + np.arange(64)] = 127
        products(quant, rounded(x), output(raw, y))
        right = 127 * w[:, begin : begin + 64].T
        there = np.isfinite(right) & np.isfinite(y)
        assert there.any()
        # A weight and its minimum may be larger than what they leave.
        size = np.abs(np.where(np.isfinite(w), w, 0)).max(axis=1)
        assert (np.abs(y - right) <= 127 * 3e-6 * np.maximum(size, 1e-30))[there].all()


@pytest.mark.parametrize("quant", EVERYDAY)
def test_large_tiles(quant: str) -> None:
    raw, w = stored(quant, 150, 256)
    x, y = rounded(inputs(140, 256)), np.full((140, 150), np.nan, np.float32)
    products(quant, x, output(raw, y), size=128)
    close(y, x.numbers @ w.T)


@pytest.mark.parametrize("size", [64, 128])
def test_a_row_does_not_depend_on_the_tile(size: int) -> None:
    raw, _ = stored("Q4_K", 20, 256)
    x = inputs(33, 256)
    alone, together = np.zeros((1, 20), np.float32), np.zeros((33, 20), np.float32)
    products("Q4_K", rounded(x[32:]), output(raw, alone))
    products("Q4_K", rounded(x), output(raw, together), size=size)
    assert (alone[0] == together[32]).all()


def test_the_largest_sums() -> None:
    """Of bytes that are all as large as can be."""
    raw = aligned(np.tile(np.concatenate([[0x00, 0x3C], np.full(32, 0x80)]).astype(np.uint8), 2 * 8))
    x, y = np.full((4, 64), -127, np.float32), np.zeros((4, 8), np.float32)
    products("Q8_0", rounded(x), output(raw, y))
    assert (y == 64 * 127 * 128).all()


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0"])
def test_rows_of_one_slab_more(quant: str) -> None:
    raw, w = stored(quant, 7, 192)
    x, y = rounded(inputs(3, 192)), np.full((3, 7), np.nan, np.float32)
    products(quant, x, output(raw, y))
    close(y, x.numbers @ w.T)


def test_three_matrices_with_one_input() -> None:
    sizes, tokens, cols = (70, 5, 16), 9, 256
    made = [stored("Q4_K", n, cols, seed) for seed, n in enumerate(sizes)]
    results = [np.zeros((tokens, n), np.float32) for n in sizes]
    bias, add = np.arange(5, dtype=np.float32), inputs(tokens, 32)[:, :16].copy()
    x = rounded(inputs(tokens, cols))
    outputs = (
        output(made[0][0], results[0]),
        output(made[1][0], results[1], bias=bias),
        output(made[2][0], results[2], add=add),
    )
    products("Q4_K", x, *outputs)
    right = [x.numbers @ w.T for _, w in made]
    for found, expected in zip(results, (right[0], right[1] + bias, right[2] + add), strict=True):
        close(found, expected)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("act", [0, 1, 2])
def test_gates(size: int, act: int) -> None:
    rows, tokens, cols = 75, 40, 256
    (gate, g), (up, u) = (stored("Q4_K", rows, cols, seed) for seed in (0, 1))
    x, y = rounded(inputs(tokens, cols) / 16), np.full((tokens, rows), np.nan, np.float32)
    bias, none = np.linspace(-1, 1, rows, dtype=np.float32), c_void_p(None)
    arguments = gate, up, bias if act else none, none if act else bias, y, rows, act, x.given
    grid, source = (int8.gated_blocks(size, tokens, rows),), int8.source("Q4_K")
    shared = int8.shared(size)
    run(source, f"gated_{size}", grid, int8.threads(size), *arguments, shared=shared)
    right = activated(x.numbers @ g.T + bias * (act > 0), act) * (x.numbers @ u.T + bias * (act == 0))
    close(y, right, 1e-5)


def test_tiles_leave_work_for_all_processors() -> None:
    assert int8.tile(40, 1, 4096) == 64
    assert int8.tile(512, 128, 4096) == 128
    assert int8.tile(128, 128, 4096) == 64
