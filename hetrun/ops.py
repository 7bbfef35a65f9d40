"""The op kinds: what each one takes, what it costs and what it means.

This table is the whole vocabulary of a graph. The meaning in numpy stands in `backends/reference`, under
the same names; a backend says which kinds it supports and the reference does the rest.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attrs:
    """Attributes of an op; kinds with any have a class of their own."""


@dataclass(frozen=True, slots=True)
class RmsNorm(Attrs):
    """x / sqrt(mean(x^2) + eps) * weight."""

    eps: float


@dataclass(frozen=True, slots=True)
class Rope(Attrs):
    """Rotate pairs of the first `n_rot` columns of each head by position / base^(2i / n_rot).

    `interleaved` pairs neighbours (2i, 2i+1), as GGUF permutes llama's weights; otherwise i and i + n_rot/2.
    `freq_scale` multiplies the angles (1/factor for linear scaling). With `ext_factor` > 0 the angles are
    YaRN's: a ramp between `beta_fast` and `beta_slow` rotations over `n_ctx_orig` tokens chooses between
    scaled and unscaled, and cos and sin are multiplied by attn_factor * (1 + 0.1 ln(1 / freq_scale)).
    An optional weight divides the angles (llama 3's frequency factors).
    """

    n_heads: int
    head_dim: int
    n_rot: int
    base: float
    interleaved: bool
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0


@dataclass(frozen=True, slots=True)
class Attention(Attrs):
    """Causal attention of q over the sequence's K and V, this step's k and v written first.

    Inputs are q, k and v. k and v have a row per token; q may have wanted rows only.
    """

    layer: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One row of the table."""

    kind: str
    n_inputs: int
    n_weights: Container[int]
    attrs: type[Attrs]
    meaning: str


_ROWS = (
    OpSpec("embed", 0, (1,), Attrs, "rows of the weight, one for each token id of the step"),
    OpSpec("rms_norm", 1, (1,), RmsNorm, "root mean square normalisation, times the weight"),
    OpSpec("linear", 1, (1, 2), Attrs, "x @ weight.T, plus the second weight as a bias"),
    OpSpec("rope", 1, (0, 1), Rope, "rotary position embedding of each head"),
    OpSpec("attention", 3, (0,), Attention, "causal attention; writes K and V"),
    OpSpec("swiglu", 2, (0,), Attrs, "silu(first) * second"),
    OpSpec("add", 2, (0,), Attrs, "first + second"),
    OpSpec("select", 1, (0,), Attrs, "the wanted rows of a value with a row for each token"),
    OpSpec(
        "head",
        1,
        (1, 2),
        Attrs,
        "as linear: from the hidden state to a logit for each token of the vocabulary",
    ),
)

OPS: dict[str, OpSpec] = {row.kind: row for row in _ROWS}
NONE = Attrs()


def flops(kind: str, weight_elements: int, rows: int) -> int:
    """Multiplications and additions of a matrix product; the other kinds are bound by memory and count as none."""
    return 2 * weight_elements * rows if kind in ("linear", "head") else 0
