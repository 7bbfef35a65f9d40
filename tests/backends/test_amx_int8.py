"""Int8 products against whole numbers and against float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.examples import examples

if TYPE_CHECKING:
    from torch import Tensor

    from hetrun.backends.amx.bf16_matmul import Activation

torch = pytest.importorskip("torch")
int8 = pytest.importorskip("hetrun.backends.amx.int8_matmul")


def error(found: Tensor, exact: np.ndarray) -> float:
    """Root of the mean square, as a part of that of the exact result."""
    off = found.float().numpy() - exact
    return float(np.sqrt(np.mean(np.square(off)) / np.mean(np.square(exact))))


def rounded(rng: np.random.Generator, rows: int, cols: int) -> tuple[np.ndarray, Any]:
    """Numbers that bf16 has, as float32 and as bf16."""
    x = torch.from_numpy(rng.standard_normal((rows, cols), np.float32)).bfloat16()
    return x.float().numpy(), x


@settings(max_examples=examples(30))
@given(st.integers(1, 40), st.integers(1, 150), st.integers(1, 300), st.booleans(), st.integers(0, 1 << 30))
def test_whole_numbers_are_exact(n: int, m: int, k: int, packs: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k), np.uint8)
    weight = rng.integers(-127, 128, (m, k)).astype(np.int8)
    scale = 2.0 ** rng.integers(-3, 3, m).astype(np.float32)
    exact = (codes.astype(np.int64) - 128) @ weight.T.astype(np.int64) * scale
    with mock.patch.object(int8, "packs8", return_value=packs and int8.packs8()):
        packed = int8.pack8(torch.from_numpy(weight))
        found = int8.multiply8(torch.from_numpy(codes), packed, torch.from_numpy(scale), torch.float32)
    np.testing.assert_array_equal(found.numpy(), exact.astype(np.float32))


@settings(max_examples=examples(30))
@given(st.integers(1, 40), st.integers(1, 150), st.integers(1, 300), st.booleans(), st.integers(0, 1 << 30))
def test_close_to_float32(n: int, m: int, k: int, biased: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((m, k), np.float32)
    numbers, x = rounded(rng, n, k)
    bias = rng.standard_normal(m, np.float32) if biased else np.zeros(m, np.float32)
    product = int8.Int8Product.make(weight)
    found = product(x, torch.from_numpy(bias) if biased else None)
    assert found.shape == (n, m)
    exact = numbers @ weight.T + bias
    # Steps of 1/127 and 1/253 of the largest of some hundred normal numbers, and results rounded to bf16: 1 %
    # of the products' usual size. One result may by chance be far smaller than that.
    off = found.float().numpy() - exact
    assert np.sqrt(np.mean(np.square(off))) < 0.02 * np.sqrt(k + np.mean(np.square(exact)))


@given(st.integers(1, 1 << 14))
def test_the_turn_is_one(cols: int) -> None:
    """Its columns are at right angles and of one length, in blocks that the width can be cut into."""
    full = int8.turn(cols)
    assert cols % len(full) == 0
    assert len(full) == 64 or cols // len(full) % 2 == 1
    torch.testing.assert_close(full.t() @ full, len(full) * torch.eye(len(full)))


def test_columns_that_are_far_larger_take_little_from_the_others() -> None:
    rng = np.random.default_rng(0)
    weight, (_, x) = rng.standard_normal((64, 512), np.float32), rounded(rng, 100, 512)
    large = [3, 77, 500]
    weight[:, large] = 0  # what is large itself is not to hide what is lost of the rest
    x[:, large] *= 40
    exact = x.float().numpy() @ weight.T
    lost = error(int8.Int8Product.make(weight)(x), exact)
    with mock.patch.object(int8, "BLOCK", 1):
        unturned = error(int8.Int8Product.make(weight)(x), exact)
    assert lost < 0.06
    assert lost < unturned / 3


@settings(max_examples=examples(30))
@given(
    st.integers(1, 40),
    st.integers(1, 150),
    st.sampled_from([1, 7, 96, 576]),
    st.booleans(),
    st.sampled_from(["swish", "relu", "gelu", "gelu-tanh"]),
    st.integers(0, 1 << 30),
)
def test_a_gate_is_its_two_products(n: int, m: int, k: int, biased: bool, act: Activation, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gate, up = (int8.Int8Product.make(rng.standard_normal((m, k), np.float32)) for _ in "ab")
    x = rounded(rng, n, k)[1]
    biases = tuple(torch.from_numpy(rng.standard_normal(m, np.float32)) if biased else None for _ in "ab")
    with mock.patch.object(int8, "AT_ONCE", 5 * m):  # more than one step
        found = gate.gated(up, x, act, biases)
    activated = int8.activate(gate(x, biases[0]), act)
    torch.testing.assert_close(gate(x, biases[0], act), activated)
    torch.testing.assert_close(found, activated * up(x, biases[1]))


def test_rows_of_one_sign_and_of_any_size() -> None:
    """Each row has its own scale; a row of zeros gives zeros, or the bias."""
    rng = np.random.default_rng(1)
    weight, (_, x) = rng.standard_normal((48, 256), np.float32), rounded(rng, 6, 256)
    x[0] = x[0].abs() + 3
    x[1] = -x[1].abs() - 3
    x[2] *= 1e-6
    x[3] *= 1e6
    x[4] = 0
    product = int8.Int8Product.make(weight)
    found, exact = product(x), x.float().numpy() @ weight.T
    for row in (0, 1, 2, 3, 5):
        assert error(found[row], exact[row]) < 0.02
    assert found[4].abs().max() < 1e-20
    bias = torch.arange(48.0)
    torch.testing.assert_close(product(x, bias)[4].float(), bias)


def test_takes_half_of_bf16() -> None:
    product = int8.Int8Product.make(np.ones((256, 2048), np.float32))
    assert product.size == 256 * 2048
    assert product.size <= product.nbytes < 1.01 * product.size
