"""Products of inputs that were rounded to bytes, on the emulator: against numpy on the same bytes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from hetrun.backend import Backend
from hetrun.backend.conformance.cases import CASES, OpCase
from hetrun.backend.conformance.runner import allowed, build, compared, outcome, reference
from hetrun.backends.cuda.backend import CudaBackend
from hetrun.backends.cuda.matmul_launch import INT8_TYPES, ROUNDED, THREADS, blocks, group_of, int8_row
from hetrun.backends.cuda.programs import Source
from hetrun.backends.reference import descriptor
from hetrun.backends.reference.moe import gated
from hetrun.graph.ops import Moe
from hetrun.graph.quant import by_name
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.driver import EmulatedDriver
from tests.cuda.emulated.kernels import needs_compiler, run
from tests.cuda.test_matmul import activated, aligned, any_bytes, inputs, output, stored
from tests.models.tiny import TinyLlama
from tests.support.rig import rig
from tests.support.tiers import exhaustive, first

pytestmark = [needs_compiler, pytest.mark.slow]  # every kernel is built
COLS, ROWS = 512, 37
TYPES = sorted(INT8_TYPES)
# Each type is a program of its own, which has to be built; `make test` builds two.
EACH = first(["Q4_K", "Q6_K", *sorted(INT8_TYPES - {"Q4_K", "Q6_K"})], 2)
SMALL = Source("small")


def source(quant: str) -> Source:
    return Source("products", (("QUANT", quant), ("INT8", "int8")))


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs as kernels take them, and the numbers that they stand for."""
    tokens, cols = x.shape
    made = aligned(np.zeros(tokens * int8_row(cols), np.uint8)).reshape(tokens, -1)
    run(SMALL, "round_int8", (2,), 128, x, made, cols, ctypes.c_longlong(x.size))
    q = made[:, :cols].view(np.int8).astype(np.float32).reshape(tokens, -1, ROUNDED)
    return made, (q * scales(made, cols)[..., :1]).reshape(tokens, cols)


def scales(made: np.ndarray, cols: int) -> np.ndarray:
    """Scale and sum of each 32 numbers."""
    behind = np.ascontiguousarray(made[:, cols : cols + cols // ROUNDED * 8])
    return behind.view(np.float32).reshape(len(made), -1, 2)


def few(quant: str, cols: int, made: np.ndarray, y: np.ndarray, raw: np.ndarray) -> None:
    tokens = len(made)
    grid = (blocks(tokens, y.shape[1], int8=True),)
    empty = output(raw[:0], y[:, :0])
    arguments = output(raw, y), empty, empty, made, cols, made.shape[1], tokens
    run(source(quant), f"few_{group_of(tokens)}", grid, THREADS, *arguments)


def close(found: np.ndarray, expected: np.ndarray, part: float = 3e-6) -> None:
    assert np.abs(found - expected).max() <= part * np.abs(expected).max()


@pytest.mark.parametrize("cols", [32, 96, 512])
def test_inputs_are_rounded_by_the_largest_of_each_32(cols: int) -> None:
    x = inputs(5, cols)
    x[1, :32] = 0.0
    x[2, 0] = 1e4
    made, numbers = rounded(x)
    of = x.reshape(5, -1, ROUNDED)
    most = np.abs(of).max(2)
    assert (np.abs(numbers - x).reshape(of.shape).max(2) <= most / 254 * 1.0001).all()
    found, bytes_of = scales(made, cols), made[:, :cols].view(np.int8).reshape(of.shape)
    np.testing.assert_allclose(found[..., 0], most / 127, rtol=1e-6)
    np.testing.assert_allclose(found[..., 1], found[..., 0] * bytes_of.sum(2), rtol=1e-6)
    assert (np.abs(bytes_of).max(2)[most > 0] == 127).all()


@pytest.mark.parametrize("width", [32, 96, 1056, 2048])
def test_norms_leave_the_same_bytes(width: int) -> None:
    x, w, y = inputs(3, width), inputs(1, width, 2), np.zeros((3, width), np.float32)
    in_bytes = np.full((3, int8_row(width)), 0xA5, np.uint8)
    run(SMALL, "rms_norm", (3,), 128, x, w, y, in_bytes, width, 1, 1e-5, shared=16)
    expected, _ = rounded(aligned(y).view(np.float32).reshape(y.shape))
    end = width + width // ROUNDED * 8
    np.testing.assert_array_equal(in_bytes[:, :end], expected[:, :end])
    assert (in_bytes[:, end:] == 0xA5).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_not_rounded_away(wrong: float) -> None:
    x = inputs(2)
    x[1, 40] = wrong
    raw, _ = stored("Q4_K", 3, COLS)
    y = np.zeros((2, 3), np.float32)
    few("Q4_K", COLS, rounded(x)[0], y, raw)
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()


@pytest.mark.parametrize("quant", EACH)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 17])
def test_products(quant: str, tokens: int) -> None:
    raw, numbers = stored(quant, ROWS, COLS)
    made, x = rounded(inputs(tokens))
    y = np.full((tokens, ROWS), np.nan, np.float32)
    few(quant, COLS, made, y, raw)
    close(y, x.astype(np.float64) @ numbers.T.astype(np.float64))


@pytest.mark.parametrize("quant", EACH)
def test_every_bit_of_a_block_counts(quant: str) -> None:
    raw = any_bytes(quant, 9, COLS).reshape(9, -1)
    for at in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(quant, (0,)):  # halves that are finite
        size = {"Q4_0": 18, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[quant]
        raw.reshape(-1, size)[:, at : at + 2] = np.frombuffer(np.float16(0.01 * (1 + at)).tobytes(), np.uint8)
    numbers = by_name(quant).dequantise(raw, COLS)
    made, x = rounded(inputs(3))
    y = np.full((3, 9), np.nan, np.float32)
    few(quant, COLS, made, y, raw)
    close(y, x.astype(np.float64) @ numbers.T.astype(np.float64), 1e-5)


@pytest.mark.parametrize("quant", EACH)
@pytest.mark.parametrize("cols", [256, 768, 2304, 2816, 4608])
def test_rows_of_any_length(quant: str, cols: int) -> None:
    # A step of a walk is 2,048 columns at most: the last one may be short.
    raw, numbers = stored(quant, 5, cols)
    made, x = rounded(inputs(3, cols))
    y = np.full((3, 5), np.nan, np.float32)
    few(quant, cols, made, y, raw)
    close(y, x.astype(np.float64) @ numbers.T.astype(np.float64))


@pytest.mark.parametrize("quant", EACH)
def test_a_row_does_not_depend_on_its_company(quant: str) -> None:
    raw, _ = stored(quant, ROWS, COLS)
    made, _ = rounded(inputs(9))
    together = np.zeros((9, ROWS), np.float32)
    few(quant, COLS, made, together, raw)
    for a, b in ((0, 1), (8, 9), (1, 3), (3, 7), (2, 9)):
        mine = np.zeros((b - a, ROWS), np.float32)
        few(quant, COLS, aligned(made[a:b]).reshape(b - a, -1), mine, raw)
        assert (mine == together[a:b]).all()


@pytest.mark.parametrize("quant", EACH)
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_gates(quant: str, tokens: int) -> None:
    (gate, g), (up, u) = (stored(quant, ROWS, COLS, seed) for seed in (0, 1))
    made, x = rounded(inputs(tokens))
    y, none = np.zeros((tokens, ROWS), np.float32), ctypes.c_void_p(None)
    arguments = gate, up, none, none, y, ROWS, made, COLS, made.shape[1], tokens, 0
    grid = (blocks(tokens, ROWS, int8=True),)
    run(source(quant), f"gated_{group_of(tokens)}", grid, THREADS, *arguments)
    close(y, activated(x @ g.T, 0) * (x @ u.T), 1e-5)


@pytest.mark.parametrize("quant", EACH)
def test_experts(quant: str) -> None:
    held, n_ff, width, tokens, used = 3, 256, 512, 3, 2
    (gate, g), (up, u) = (stored(quant, held * n_ff, width, seed) for seed in (0, 1))
    down, d = stored(quant, held * width, n_ff, 2)
    made, x = rounded(inputs(tokens, width))
    chosen = np.array([[0, 2], [1, 3], [2, 1]], np.int32)  # 3 is not held
    shares = np.random.default_rng(0).random((tokens, used), dtype=np.float32)
    pairs, none = tokens * used, ctypes.c_void_p(None)
    inner, y = np.full((pairs, n_ff), np.nan, np.float32), np.full((pairs, width), np.nan, np.float32)
    run(source(quant), "experts_gated", (pairs * n_ff // 4,), THREADS,
        gate, up, none, none, chosen, 0, held, inner, made, n_ff, width, used, pairs, 0)  # fmt: skip
    between, numbers = rounded(aligned(inner).view(np.float32).reshape(pairs, n_ff))
    run(source(quant), "experts_down", (pairs * width // 4,), THREADS,
        down, none, chosen, shares, 0, held, y, between, width, n_ff, pairs)  # fmt: skip
    for pair, e in enumerate(chosen.reshape(-1)):
        if e == held:
            assert not y[pair].any()
            continue
        a = slice(e * n_ff, (e + 1) * n_ff)
        close(inner[pair], gated("silu", x[pair // used] @ g[a].T, x[pair // used] @ u[a].T), 1e-5)
        right = shares.reshape(-1)[pair] * (numbers[pair] @ d[e * width : (e + 1) * width].T)
        close(y[pair], right, 1e-5)


# --- the backend

MODEL = TinyLlama("cuda-fast", layers=2, embd=256, ffn=256, heads=4, kv_heads=2, head_dim=64, quant="Q4_K")


def device(exact: bool, driver: EmulatedDriver | None = None) -> CudaBackend:
    made = emulated(driver, name="cuda")
    made.exact = exact
    return made


def logits(backend: Backend, *lengths: int) -> np.ndarray:
    """What a model says to passes of some lengths."""
    r = rig(MODEL, {"it": backend}, context=256, ubatch=64)
    seq, rng = r.kv.alloc(), np.random.default_rng(0)
    found = [r.logits(seq, rng.integers(0, 100, n).tolist()) for n in lengths]
    r.close()
    return np.concatenate(found)


def test_a_model_that_may_be_fast_is_close_and_one_that_may_not_is_closer() -> None:
    lengths = 5, 1, 1, 2, 1
    right = logits(descriptor.create(), *lengths)
    far = {}
    for exact in (True, False):
        found = logits(device(exact), *lengths)
        far[exact] = float(np.square(found - right).sum() / np.square(right).sum())
    assert far[True] < 1e-9 < far[False] < 1e-3


def test_an_input_is_rounded_once_for_all_of_its_products() -> None:
    driver = EmulatedDriver()
    logits(device(exact=False, driver=driver), 1)
    # Norms and attention leave bytes beside floats. What the gate of a layer made is rounded by itself, and
    # so are the rows that the head gets.
    assert driver.launches.count("round_int8") == MODEL.layers + 1
    assert "gated_1" in driver.launches
    exact = EmulatedDriver()
    logits(device(exact=True, driver=exact), 1)
    assert "round_int8" not in exact.launches


def test_a_way_to_stream_is_as_exact_as_the_device() -> None:
    backend = device(exact=False)
    backend.grant(64 << 20)
    found = backend.streaming(1 << 20)
    assert found is not None
    assert not found[0].exact
    backend.close()


FAST = [
    case for case in CASES
    if case.kind in ("linear", "head", "moe") and case.quant in INT8_TYPES
    if not (isinstance(case.attrs, Moe) and case.attrs.without)
]  # fmt: skip


def often(case: OpCase) -> bool:
    """Whether `make test` has it: of mixtures, which take a second each, two."""
    return case.quant == "Q4_K" and (case.kind != "moe" or case.note == "8x2n")


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=() if often(c) else exhaustive) for c in FAST]
)
def test_a_device_that_may_be_fast_computes_what_the_reference_does(case: OpCase, tmp_path: Path) -> None:
    backend = device(exact=False)
    here, there = (outcome(case, build(case, tmp_path), b) for b in (reference(), backend))
    trial = compared(case, here, there, allowed(case, backend))
    assert trial.state == "ok", trial.said
    backend.close()
