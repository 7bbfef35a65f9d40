"""Experts of many tokens in bytes on the emulator, against numpy on the same bytes."""

from __future__ import annotations

from ctypes import c_void_p
from dataclasses import dataclass

import numpy as np
import pytest

from hetrun.backend.conformance.cases import CASES
from hetrun.backend.conformance.random_weights import packed
from hetrun.backend.conformance.runner import allowed, build, compared, outcome, reference
from hetrun.backends.cuda import grouped_launch
from hetrun.backends.cuda.backend import EIGHT_BITS, ROUNDED_BOTH
from hetrun.backends.cuda.int8 import launch as int8
from hetrun.backends.cuda.matmul_launch import ROUNDED, int8_row
from hetrun.backends.reference.moe import gated
from hetrun.graph.quant import by_name
from tests.cuda import test_int8
from tests.cuda.emulated.driver import EmulatedDriver
from tests.cuda.emulated.kernels import needs_compiler, run
from tests.cuda.test_tiles import FIRST, HELD, aligned, choices, grouped_pairs
from tests.support.tiers import first

pytestmark = [needs_compiler, pytest.mark.slow]  # every kernel is built
EVERYDAY = ["Q4_K", "Q6_K"]
EACH = first([*EVERYDAY, *sorted(int8.TYPES - set(EVERYDAY))], len(EVERYDAY))
NOT_TOUCHED = 0xA5


def stored(quant: str, rows: int, cols: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random weights of all experts as a file has them, and as numbers."""
    rng = np.random.default_rng(seed)
    raw = packed(rng.standard_normal((HELD * rows, cols), dtype=np.float32) / np.float32(16), by_name(quant))
    return aligned(raw), by_name(quant).dequantise(raw, cols).astype(np.float64).reshape(HELD, rows, cols)


@dataclass
class Experts:
    """A mixture, some of whose experts are held, and tokens that have chosen theirs."""

    quants: tuple[str, str]
    tokens: int
    used: int
    n_ff: int
    width: int
    clamped: bool = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng(3)
        quant, other = self.quants
        self.weights = [
            *(stored(quant, self.n_ff, self.width, seed) for seed in (0, 1)),
            stored(other, self.width, self.n_ff, 2),
        ]
        self.biases = [
            rng.standard_normal((HELD, n), dtype=np.float32) for n in (self.n_ff, self.n_ff, self.width)
        ]
        self.x = rng.standard_normal((self.tokens, self.width), dtype=np.float32)
        self.shares = rng.random((self.tokens, self.used), dtype=np.float32)
        self.chosen = choices(self.tokens, self.used, seed=4)

    def run(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By place whose pair it is and what lies between the products; by pair the results."""
        pairs, act = self.chosen.size, 3 if self.clamped else 0
        order, tiles = grouped_pairs(self.chosen, FIRST, HELD)
        given = [aligned(b) if self.clamped else c_void_p(0) for b in self.biases]
        told = order, tiles.view(np.uint8), HELD
        (gate, _), (up, _), (down, _) = self.weights
        x, self.numbers = test_int8.rounded(aligned(self.x))
        inner = aligned(np.full((pairs, int8_row(self.n_ff)), NOT_TOUCHED, np.uint8))
        y = aligned(np.full((pairs, self.width), np.nan, np.float32))
        kernel, shared = grouped_launch.gated(self.quants[0], in_bytes=True)
        grid = grouped_launch.gated_grid(pairs, HELD, self.n_ff)
        run(*kernel, grid, grouped_launch.THREADS, gate, up, *given[:2], *told, inner, x,
            self.n_ff, self.width, self.used, act, shared=shared)  # fmt: skip
        kernel, shared = grouped_launch.down(self.quants[1], in_bytes=True)
        grid = grouped_launch.down_grid(pairs, HELD, self.width)
        run(*kernel, grid, grouped_launch.THREADS, down, given[2], *told, self.shares, y, inner,
            self.width, self.n_ff, shared=shared)  # fmt: skip
        return order, inner, y

    def check(self) -> None:
        """Both products against numpy, which rounds what they round."""
        order, inner, y = self.run()
        (_, g), (_, u), (_, d) = self.weights
        scales, q = test_int8.scales(inner, self.n_ff), inner[:, : self.n_ff].view(np.int8).astype(np.float64)
        between = (q.reshape(len(q), -1, ROUNDED) * scales[..., :1]).reshape(q.shape)
        for place, pair in enumerate(order):
            e = self.chosen.reshape(-1)[pair] - FIRST
            if not 0 <= e < HELD:
                assert not y[pair].any()
                assert (inner[place] == NOT_TOUCHED).all()
                continue
            mine = self.numbers[pair // self.used].astype(np.float64)
            one, other, last = (b[e] if self.clamped else 0 for b in self.biases)
            right = gated("clamped" if self.clamped else "silu", g[e] @ mine + one, u[e] @ mine + other)
            runs, sums = right.reshape(-1, ROUNDED), q[place].reshape(-1, ROUNDED).sum(1)
            step = np.abs(runs).max(1) / 127
            np.testing.assert_allclose(scales[place, :, 0], step, rtol=1e-4)
            np.testing.assert_allclose(scales[place, :, 1], scales[place, :, 0] * sums, rtol=1e-6)
            assert (np.abs(between[place].reshape(runs.shape) - runs) <= 0.501 * step[:, None]).all()
            right = self.shares.reshape(-1)[pair] * (d[e] @ between[place] + last)
            assert np.abs(y[pair] - right).max() <= 1e-5 * np.abs(right).max()


@pytest.mark.parametrize("quant", EACH)
def test_products_of_tiles(quant: str) -> None:
    # Tiles of more and of fewer pairs than a warp takes.
    Experts((quant, quant), tokens=90, used=2, n_ff=256, width=256).check()


def test_types_that_differ_and_rows_of_any_number() -> None:
    # Of slabs, and of weights: they end inside a block of the grid.
    Experts(("Q4_0", "Q8_0"), tokens=40, used=3, n_ff=192, width=320).check()


def test_experts_with_biases() -> None:
    Experts(("MXFP4", "MXFP4"), tokens=50, used=2, n_ff=64, width=192, clamped=True).check()


def test_an_expert_of_several_tiles() -> None:
    Experts(("Q8_0", "Q8_0"), tokens=400, used=2, n_ff=64, width=64).check()


def test_a_pair_does_not_depend_on_its_company() -> None:
    together = Experts(("Q4_K", "Q4_K"), tokens=70, used=2, n_ff=256, width=256)
    _, _, y = together.run()
    alone = Experts(("Q4_K", "Q4_K"), tokens=3, used=2, n_ff=256, width=256)
    for name in ("x", "shares", "chosen"):
        setattr(alone, name, np.ascontiguousarray(getattr(together, name)[20:23]))
    np.testing.assert_array_equal(alone.run()[2], y[40:46])


def test_what_is_not_a_number_is_seen_in_its_row_only() -> None:
    experts = Experts(("Q8_0", "Q8_0"), tokens=4, used=1, n_ff=64, width=64)
    experts.chosen[:] = FIRST
    experts.x[2, 40] = np.nan
    _, _, y = experts.run()
    assert np.isnan(y[2]).all()
    assert np.isfinite(y[[0, 1, 3]]).all()


@pytest.mark.parametrize("exact", [True, False])
def test_a_mixture_of_many_tokens(exact: bool) -> None:
    case = next(c for c in CASES if str(c) == "moe-F32-Q4_K-Q4_K-Q4_K-64@0w64-8x2n")
    driver = EmulatedDriver()
    backend = test_int8.device(exact, driver)
    here, there = (outcome(case, build(case), b) for b in (reference(), backend))
    assert compared(case, here, there, allowed(case, backend)).state == "ok"
    in_bytes = {"round_int8", "experts_gated_int8", "experts_down_int8"}
    others = {"round_bf16", "experts_gated_many", "experts_down_many"}
    assert set(driver.launches) & (in_bytes | others) == (others if exact else in_bytes)
    assert backend.rounding(build(case)) == (ROUNDED_BOTH if exact else EIGHT_BITS)
    backend.close()
