"""The products' kernels on the emulator: each type of weights, against numpy."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_void_p
from pathlib import Path

import numpy as np
import pytest

from hetrun.backend.conformance.random_weights import packed
from hetrun.backends.cuda.matmul_launch import THREADS, MatmulOutput, blocks, group_of
from hetrun.backends.cuda.programs import Source
from hetrun.backends.cuda.weights import READ
from hetrun.backends.reference.moe import gated
from hetrun.graph.quant import by_name
from tests.cuda.emulated.kernels import needs_compiler, run
from tests.support.tiers import first

pytestmark = [needs_compiler, pytest.mark.slow]  # every kernel is built
COLS, ROWS = 512, 37
TYPES = sorted(READ)
EVERYDAY = ["BF16", "Q4_0", "Q4_K", "Q5_K", "Q6_K"]  # one for each way of walking along a row, and Q5_K
# Each type is a program of its own, which has to be built; `make test` builds those.
EACH = first([*EVERYDAY, *sorted(READ - set(EVERYDAY))], len(EVERYDAY))
UNPACKED = Path(__file__).parent / "emulated" / "unpacked.cu"


def source(quant: str) -> Source:
    return Source("products", (("QUANT", quant),))


def stored(quant: str, rows: int, cols: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random weights as a file has them, on a border of 16 bytes, and as numbers."""
    numbers = np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)
    raw = packed(numbers, by_name(quant))
    return aligned(raw), by_name(quant).dequantise(raw, cols)


def aligned(array: np.ndarray) -> np.ndarray:
    room = np.zeros(array.nbytes + 64, np.uint8)
    at = -room.ctypes.data % 64
    room[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
    return room[at : at + array.nbytes]


def inputs(tokens: int, cols: int = COLS, seed: int = 1) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((tokens, cols), dtype=np.float32)
    return aligned(x).view(np.float32).reshape(tokens, cols)


def output(
    w: np.ndarray, y: np.ndarray, bias: np.ndarray | None = None, add: np.ndarray | None = None
) -> MatmulOutput:
    def address(array: np.ndarray | None) -> int | None:
        return None if array is None else array.ctypes.data

    return MatmulOutput(address(w), address(bias), address(add), address(y), y.shape[1], y.shape[1])


def few(quant: str, x: np.ndarray, *outputs: MatmulOutput, seed: int = 1) -> None:
    tokens = len(x)
    three = (*outputs, MatmulOutput(), MatmulOutput())[:3]
    grid = (blocks(tokens, *(o.rows for o in outputs)),)
    name = f"few_{group_of(tokens)}"
    run(source(quant), name, grid, THREADS, *three, x, x.shape[1], x.shape[1], tokens, seed=seed)


def any_bytes(quant: str, rows: int, cols: int) -> np.ndarray:
    """Rows of random bytes, as no program quantises them: every bit of a block counts."""
    kind = by_name(quant)
    if quant in ("F32", "F16", "BF16"):
        return stored(quant, rows, cols)[0]
    raw = np.random.default_rng(2).integers(0, 256, rows * kind.row_bytes(cols), dtype=np.uint8)
    return aligned(raw)


@pytest.mark.parametrize("quant", TYPES)
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")
def test_weights_of_every_type_are_unpacked(quant: str) -> None:
    raw = any_bytes(quant, 9, COLS)
    y = np.zeros((9, COLS), np.float32)
    run(UNPACKED, f"unpacked_{quant}", (2,), 64, raw, y, y.size // 8)
    np.testing.assert_array_equal(y, by_name(quant).dequantise(raw, COLS))


@pytest.mark.parametrize("quant", EACH)
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")
def test_weights_are_what_the_file_says(quant: str) -> None:
    raw = any_bytes(quant, 9, COLS)
    numbers = by_name(quant).dequantise(raw, COLS)
    y = np.zeros((8, COLS), np.float32)
    ids = np.array([7, 0, 2, 1, 3, 6, 4, 5], np.int32)
    run(source(quant), "lookup", (8,), 64, raw, ids, 1, y, COLS)
    np.testing.assert_array_equal(y, numbers[ids + 1])

    halves = np.zeros((9, COLS), np.uint16)
    pieces = 9 * COLS // 8
    run(source(quant), "unpack_bf16", (3,), 64, raw, halves, ctypes.c_longlong(pieces))
    found = (halves.astype(np.uint32) << 16).view(np.float32)
    rounded = by_name("BF16").quantise(numbers).view(np.uint16).reshape(halves.shape)
    np.testing.assert_array_equal(found, (rounded.astype(np.uint32) << 16).view(np.float32))


@pytest.mark.parametrize("quant", EACH)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 17])
def test_products(quant: str, tokens: int) -> None:
    raw, numbers = stored(quant, ROWS, COLS)
    x, y = inputs(tokens), np.full((tokens, ROWS), np.nan, np.float32)
    few(quant, x, output(raw, y))
    expected = x.astype(np.float64) @ numbers.T.astype(np.float64)
    assert np.abs(y - expected).max() <= 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize("quant", EVERYDAY)
@pytest.mark.parametrize("blocks_of_256", [1, 3, 4, 5, 11])
def test_rows_of_any_length(quant: str, blocks_of_256: int) -> None:
    # A step of a walk is two or four blocks: the last one may be short.
    cols, tokens = 256 * blocks_of_256, 3
    raw, numbers = stored(quant, 6, cols)
    x, y = inputs(tokens, cols), np.full((tokens, 6), np.nan, np.float32)
    few(quant, x, output(raw, y))
    expected = x.astype(np.float64) @ numbers.T.astype(np.float64)
    assert np.abs(y - expected).max() <= 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize(
    "row", first([("BF16", 8), ("F32", 40), ("Q4_0", 32), ("F16", 264), ("Q8_0", 1056)], 3)
)
def test_rows_that_few_lanes_share(row: tuple[str, int]) -> None:
    quant, cols = row
    raw, numbers = stored(quant, 3, cols)
    x, y = inputs(2, cols), np.full((2, 3), np.nan, np.float32)
    few(quant, x, output(raw, y))
    expected = x.astype(np.float64) @ numbers.T.astype(np.float64)
    assert np.abs(y - expected).max() <= 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize("quant", EVERYDAY)
def test_a_row_does_not_depend_on_its_company(quant: str) -> None:
    raw, _ = stored(quant, ROWS, COLS)
    x = inputs(9)
    together = np.zeros((9, ROWS), np.float32)
    few(quant, x, output(raw, together))
    for a, b in ((0, 1), (8, 9), (1, 3), (3, 7), (2, 9)):
        mine = np.zeros((b - a, ROWS), np.float32)
        few(quant, aligned(x[a:b]).view(np.float32).reshape(b - a, COLS), output(raw, mine), seed=a)
        assert (mine == together[a:b]).all()


@pytest.mark.parametrize("quant", EVERYDAY)
def test_three_matrices_with_one_input(quant: str) -> None:
    sizes, x = (40, 5, 16), inputs(3)
    made = [stored(quant, n, COLS, seed) for seed, n in enumerate(sizes)]
    results = [np.zeros((3, n), np.float32) for n in sizes]
    bias, add = np.arange(5, dtype=np.float32), inputs(3, 16, 5).copy()
    few(
        quant,
        x,
        output(made[0][0], results[0]),
        output(made[1][0], results[1], bias=bias),
        output(made[2][0], results[2], add=add),
    )
    expected = [x @ numbers.T for _, numbers in made]
    expected[1] += bias
    expected[2] += add
    for found, right in zip(results, expected, strict=True):
        assert np.abs(found - right).max() <= 1e-5 * np.abs(right).max()


@pytest.mark.parametrize("quant", EVERYDAY)
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("act", [0, 1, 2])
def test_gates(quant: str, tokens: int, act: int) -> None:
    (gate, g), (up, u) = (stored(quant, ROWS, COLS, seed) for seed in (0, 1))
    x, y = inputs(tokens), np.zeros((tokens, ROWS), np.float32)
    bias = np.linspace(-1, 1, ROWS, dtype=np.float32)
    group = group_of(tokens)
    arguments = gate, up, bias, ctypes.c_void_p(None), y, ROWS, x, COLS, COLS, tokens, act
    run(source(quant), f"gated_{group}", (blocks(tokens, ROWS),), THREADS, *arguments)
    expected = activated(x @ g.T + bias, act) * (x @ u.T)
    assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()


def activated(x: np.ndarray, act: int) -> np.ndarray:
    if act == 0:
        inner = np.tanh(x / 2)
    elif act == 1:
        inner = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    else:
        inner = np.vectorize(math.erf)(x / math.sqrt(2))
    result: np.ndarray = 0.5 * x * (1 + inner)
    return result


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("quant", EVERYDAY)
def test_experts(quant: str, clamped: bool) -> None:
    experts, first, held, n_ff, width, tokens, used = 6, 2, 3, 256, 512, 3, 2
    (gate, g), (up, u) = (stored(quant, held * n_ff, width, seed) for seed in (0, 1))
    down, d = stored(quant, held * width, n_ff, 2)
    x = inputs(tokens, width)
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(experts)[:used] for _ in range(tokens)]).astype(np.int32)
    shares = rng.random((tokens, used), dtype=np.float32)
    pairs = tokens * used
    inner, y = np.full((pairs, n_ff), np.nan, np.float32), np.full((pairs, width), np.nan, np.float32)
    facts = chosen, first, held
    biases = [inputs(held, n, seed) for seed, n in enumerate((n_ff, n_ff, width), 3)]
    given = biases if clamped else [c_void_p(0)] * 3
    run(source(quant), "experts_gated", (pairs * n_ff // 4,), THREADS,
        gate, up, *given[:2], *facts, inner, x, n_ff, width, used, pairs, 3 if clamped else 0)  # fmt: skip
    run(source(quant), "experts_down", (pairs * width // 4,), THREADS,
        down, given[2], chosen, shares, first, held, y, inner, width, n_ff, pairs)  # fmt: skip
    for pair, e in enumerate(chosen.reshape(-1) - first):
        if not 0 <= e < held:
            assert not y[pair].any()
            continue
        mine = x[pair // used]
        a = slice(e * n_ff, (e + 1) * n_ff)
        one, other, last = (b[e] if clamped else 0 for b in biases)
        right = gated("clamped" if clamped else "silu", mine @ g[a].T + one, mine @ u[a].T + other)
        right = shares.reshape(-1)[pair] * (right @ d[e * width : (e + 1) * width].T + last)
        assert np.abs(y[pair] - right).max() <= 1e-5 * np.abs(right).max()
