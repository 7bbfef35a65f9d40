"""Products through IPEX against float32; only where it is installed (`make test-ipex`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backend import Unavailable, WeightUse
from hetrun.backends import amx
from hetrun.backends.amx.sizes import bytes_of, has_blocks
from hetrun.graph import Constant, Weight
from hetrun.graph.quant import by_name
from hetrun.loader.weight_reader import FileReader

if TYPE_CHECKING:
    from torch import Tensor

    from hetrun.backends.amx.bf16_matmul import Activation
    from hetrun.backends.amx.ipex_matmul import IpexProduct

pytestmark = pytest.mark.skipif(
    isinstance(amx.probe_ipex(), Unavailable), reason="IPEX is not installed, which is as it should be here"
)
ROUNDED = 0.005  # as a part of the result: both factors, the result and an activation are rounded to bf16


def held(numbers: np.ndarray) -> IpexProduct:
    from hetrun.backends.amx.ipex_matmul import IpexProduct

    reader = FileReader()
    try:
        return IpexProduct(weight(numbers), reader.read)
    finally:
        reader.close()


def weight(numbers: np.ndarray) -> Weight:
    rows, cols = numbers.shape
    return Weight("w", (rows, cols), by_name("F32"), (Constant(numbers.tobytes(), rows),))


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    """Numbers that bf16 has."""
    import torch

    return torch.from_numpy(rng.standard_normal(shape, np.float32)).bfloat16()


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


def activated(x: Tensor, act: str) -> Tensor:
    from torch.nn import functional

    match act:
        case "swish":
            return functional.silu(x)
        case "relu":
            return functional.relu(x)
        case "gelu" | "gelu-tanh":
            return functional.gelu(x, approximate="tanh" if act == "gelu-tanh" else "none")
    return x


SHAPES = st.sampled_from([(32, 64), (96, 128), (192, 576), (1024, 192), (48, 64), (32, 96), (5, 7)])
ROWS = st.sampled_from([1, 2, 3, 16, 17, 63, 64, 65, 200])


@settings(max_examples=60)
@given(
    SHAPES,
    ROWS,
    st.booleans(),
    st.sampled_from(["none", "swish", "relu", "gelu", "gelu-tanh"]),
    st.integers(0, 1 << 30),
)
def test_products_are_those_of_float32(
    shape: tuple[int, int], n: int, biased: bool, act: Activation, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    w, x = normal(rng, *shape).float(), normal(rng, n, shape[1])
    bias = normal(rng, shape[0]).float() if biased else None
    product = held(w.numpy())
    plain = x.float() @ w.t() + (0 if bias is None else bias)
    assert error(product(x, bias, act), activated(plain, act)) < ROUNDED
    other = normal(rng, n, shape[0])
    assert error(product.times(x, bias, other), plain * other.float()) < ROUNDED
    assert error(product.precise(x), x.float() @ w.t()) < ROUNDED / 10


def test_rows_may_be_slices_of_wider_ones_and_none_at_all() -> None:
    rng = np.random.default_rng(3)
    w, wide = normal(rng, 64, 128).float(), normal(rng, 9, 192)
    product, x = held(w.numpy()), wide[:, 32:160]
    others = normal(rng, 9, 100)[:, :64]
    assert error(product(x), x.float() @ w.t()) < ROUNDED
    assert error(product.times(x, None, others), (x.float() @ w.t()) * others.float()) < ROUNDED
    assert product(x[:0]).shape == (0, 64)


@pytest.mark.parametrize("shape", [(192, 576), (1024, 64), (48, 64), (32, 96)])
def test_memory_is_what_was_said(shape: tuple[int, int]) -> None:
    numbers = np.ones(shape, np.float32)
    product = held(numbers)
    assert product.nbytes == bytes_of(WeightUse(weight(numbers), "product"), "ipex")
    assert (product._blocks is not None) == has_blocks(*shape)
    assert (bytes_of(WeightUse(weight(numbers), "logits"), "ipex") < product.nbytes) == has_blocks(*shape)
