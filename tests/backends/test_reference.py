"""The oracle itself, against torch in double precision and against formulas written out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hetrun.backend import Pass
from hetrun.backends.reference.ops import TABLE
from hetrun.graph import KvShape, Op, Rows, Value
from hetrun.graph.ops import NONE, Attrs, Gelu, LayerNorm, Moe, Positions, RmsNorm, Scale, Softcap
from hetrun.graph.quant import by_name
from hetrun.memory.kv.cache import KvCache

RNG = np.random.default_rng(3)
KV = KvCache({0: KvShape(1, 32)}, by_name("F32"), 32, 1, 32)


def drawn(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def calculated(
    kind: str,
    x: Sequence[np.ndarray],
    weights: Sequence[np.ndarray] = (),
    attrs: Attrs = NONE,
    width: int = 0,
) -> torch.Tensor:
    rows: Rows = "tokens"
    values = tuple(Value(f"x{i}", a.shape[1], rows) for i, a in enumerate(x))
    op = Op(kind, values, Value("y", width or x[0].shape[1], rows), (), attrs, "")
    empty = np.empty(0, np.int64)
    work = Pass(np.array([3, 1, 2]), np.array([9, 4, 0]), (empty,), empty, ())
    found = TABLE[kind](op, list(x), list(weights), work, KV)
    assert found.dtype == np.float32
    return torch.from_numpy(found).double()


def doubles(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(a).double() for a in arrays]


def close(found: torch.Tensor, expected: torch.Tensor, limit: float = 2e-6) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= limit)


@pytest.mark.parametrize(("offset", "heads"), [(0.0, 1), (1.0, 1), (0.0, 4), (1.0, 4)])
def test_rms_norm(offset: float, heads: int) -> None:
    x, w = drawn(5, 48), drawn(1, 48 // heads)
    vectors, gain = doubles(x.reshape(5, heads, -1), w)
    expected = F.rms_norm(vectors, vectors.shape[2:], gain[0] + offset, 1e-5).reshape(5, 48)
    assert close(calculated("rms_norm", [x], [w], RmsNorm(1e-5, offset, heads)), expected)


@pytest.mark.parametrize("n_weights", [0, 1, 2])
def test_layer_norm(n_weights: int) -> None:
    x, weights = drawn(5, 48) + 3, [drawn(1, 48) for _ in range(n_weights)]
    weight, bias = [*(w[0] for w in doubles(*weights)), None, None][:2]
    expected = F.layer_norm(doubles(x)[0], (48,), weight, bias, 1e-5)
    assert close(calculated("layer_norm", [x], weights, LayerNorm(1e-5)), expected, 5e-6)


@pytest.mark.parametrize(("exact", "name"), [(True, "none"), (False, "tanh")])
def test_gelu_and_geglu(exact: bool, name: str) -> None:
    x, y = drawn(4, 64) * 4, drawn(4, 64)
    gate, up = doubles(x, y)
    expected = F.gelu(gate, approximate=name)
    assert close(calculated("gelu", [x], attrs=Gelu(exact)), expected)
    assert close(calculated("geglu", [x, y], attrs=Gelu(exact)), expected * up, 5e-6)


def test_swiglu_and_relu() -> None:
    x, y = drawn(4, 64) * 4, drawn(4, 64)
    gate, up = doubles(x, y)
    assert close(calculated("swiglu", [x, y]), F.silu(gate) * up, 5e-6)
    assert close(calculated("relu", [x]), F.relu(gate), 0)
    far = np.array([[-1e5, 1e5]], np.float32)
    assert calculated("swiglu", [far, np.ones_like(far)]).tolist() == [[0, 1e5]]


def test_scale_and_softcap() -> None:
    x = drawn(4, 64) * 10
    (numbers,) = doubles(x)
    assert close(calculated("scale", [x], attrs=Scale(0.3)), numbers * 0.3)
    assert close(calculated("softcap", [x], attrs=Softcap(5.0)), 5 * torch.tanh(numbers / 5))


def test_linear_adds_its_bias() -> None:
    x, w, b = drawn(4, 64), drawn(32, 64), drawn(1, 32)
    rows, matrix, bias = doubles(x, w, b)
    for kind in ("linear", "head"):
        assert close(calculated(kind, [x], [w, b]), rows @ matrix.T + bias, 2e-5)


@pytest.mark.parametrize("offset", [0, 2])
def test_rows_of_a_table_for_tokens_and_for_positions(offset: int) -> None:
    table = drawn(12, 16)
    found = calculated("positions", [], [table], Positions(offset), width=16)
    assert close(found, doubles(table)[0][[9 + offset, 4 + offset, offset]], 0)
    assert close(calculated("embed", [], [table], width=16), doubles(table)[0][[3, 1, 2]], 0)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("n_experts", "n_used"), [(8, 2), (4, 1), (5, 5), (1, 1)])
def test_a_mixture_of_experts(n_experts: int, n_used: int, normalise: bool) -> None:
    """Token by token, expert by expert, as the models' papers have it."""
    width, n_ff = 24, 16
    x, router = drawn(7, width), drawn(n_experts, width)
    gate, up = (drawn(n_experts * n_ff, width) for _ in range(2))
    down = drawn(n_experts * width, n_ff)
    tokens, r, g, u, d = doubles(x, router, gate, up, down)
    expected = torch.zeros_like(tokens)
    for i, token in enumerate(tokens):
        shares, chosen = torch.topk(torch.softmax(r @ token, 0), n_used)
        if normalise:
            shares = shares / shares.sum()
        for share, e in zip(shares, chosen.tolist(), strict=True):
            inner = F.silu(g[e * n_ff :][:n_ff] @ token) * (u[e * n_ff :][:n_ff] @ token)
            expected[i] += 0.5 * share * (d[e * width :][:width] @ inner)
    attrs = Moe(n_experts, n_used, n_ff, normalise, scale=0.5)
    found = calculated("moe", [x], [router, gate, up, down], attrs)
    assert close(found, expected, 1e-5 * float(expected.abs().max()))


def test_scores_far_apart_leave_one_expert() -> None:
    x, router = np.ones((1, 2), np.float32), np.array([[500, 0], [0, 0], [-500, 0]], np.float32)
    ones = np.ones((6, 2), np.float32)
    found = calculated("moe", [x], [router, ones, ones, ones], Moe(3, 2, 2, normalise=True))
    only = calculated("moe", [x], [router, ones, ones, ones], Moe(3, 1, 2, normalise=False))
    assert torch.equal(found, only)
