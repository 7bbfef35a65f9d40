"""The op kinds: what each one takes, what it costs and what it means.

This table is the whole vocabulary of a graph. The meaning in numpy stands in `backends/reference`, under
the same names; a backend says which kinds it supports and the reference does the rest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Attrs:
    """Attributes of an op; kinds with any have a class of their own."""

    @property
    def variant(self) -> tuple[str, ...]:
        """In what it is another computation than usual, whatever its sizes are."""
        return ()


@dataclass(frozen=True, slots=True)
class Positions(Attrs):
    """Rows of a learned table for position + offset (OPT's is 2)."""

    offset: int = 0


@dataclass(frozen=True, slots=True)
class Scale(Attrs):
    """x * factor, and times a number that is the weight, if there is one."""

    factor: float


@dataclass(frozen=True, slots=True)
class Grow(Attrs):
    """x * (1 + by * ln(1 + position // every)): queries that look for more the further they are."""

    by: float
    every: int

    def growth(self, positions: NDArray[np.integer]) -> NDArray[np.float32]:
        """By what a row is multiplied at each position."""
        steps = np.asarray(positions, np.float64) // self.every
        return (1 + self.by * np.log1p(steps)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Softcap(Attrs):
    """cap * tanh(x / cap)."""

    cap: float


@dataclass(frozen=True, slots=True)
class Gelu(Attrs):
    """x * Phi(x): `exact` by the error function, otherwise by its tanh approximation."""

    exact: bool = False


@dataclass(frozen=True, slots=True)
class RmsNorm(Attrs):
    """x / sqrt(mean(x^2) + eps) * (offset + weight); the offset is 1 for gemma as Hugging Face stores it.

    With `heads` the columns are that many equal slices, each a vector of its own, and all share the weight.
    """

    eps: float
    offset: float = 0.0
    heads: int = 1


@dataclass(frozen=True, slots=True)
class LayerNorm(Attrs):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias; either weight may be missing."""

    eps: float


Activation = Literal["silu", "gelu", "clamped"]
MoreWeight = Literal["router_bias", "choice_bias", "gate_bias", "up_bias", "down_bias", "expert_scale"]
BY_ROUTER: tuple[MoreWeight, ...] = ("router_bias", "choice_bias", "expert_scale")  # a number for each expert
MIXTURE = 4  # weights that every mixture has: router, gate, up, down
CLAMP, CLAMP_STEEPNESS = 7.0, 1.702
Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class Moe(Attrs):
    """A mixture of experts: each row goes through the `n_used` of `n_experts` that its router likes best.

    A second input, if there is one, is what the router looks at in place of the first.

    The weights are the router [n_experts, width] and gate, up [n_experts * n_ff, width] and
    down [n_experts * width, n_ff], the experts' matrices on top of each other. A row's result is the sum of
    p * down(act(gate(x)) * up(x)) over its experts; p is the router's softmax over all experts, or each one's
    sigmoid, divided by the sum of those chosen when `normalise` is set, times `scale`. `clamped` is what
    gpt-oss has between gate and up: with g and u kept below CLAMP, and u above -CLAMP, it is
    g * sigmoid(CLAMP_STEEPNESS * g) * (u + 1).

    Weights that only some mixtures have follow in the order of `more`: a bias of the router; one that only
    counts where experts are chosen, and not in p; biases of gate, up and down, a row for each expert that is
    held; and a factor of each expert's p.

    With `groups` the experts are that many groups, one next to the other, and only those of the
    `groups_used` best may be chosen: a group is worth the sum of its `group_best` best experts.

    A share of a mixture has the weights of `held` experts from `first` on, and the whole router: its result
    is the part of the sum that these experts give. Its experts may have had other `numbers` in the whole. A
    share may also have all weights, and leave the part of some experts, those `without`, to others: no device
    holds its weights a second time then.

    Which experts two shares have may also change while the model runs. One has `slots` for as many experts as
    are named, in which those lie at first; the other one computes the `rest`. Both have all weights here, and
    each pass says which expert has which slot.
    """

    n_experts: int
    n_used: int
    n_ff: int
    normalise: bool
    scale: float = 1.0
    first: int = 0
    held: int = 0  # 0: all
    without: tuple[int, ...] = ()  # ascending; only where all are held
    numbers: tuple[int, ...] = ()  # of those that are held; empty: from `first` on
    slots: tuple[int, ...] = ()  # the experts that lie in slots at first, slot by slot
    rest: bool = False  # only with slots: computes those that have none
    scores: Literal["softmax", "sigmoid"] = "softmax"
    activation: Activation = "silu"
    groups: int = 1
    groups_used: int = 1
    group_best: int = 2
    more: tuple[MoreWeight, ...] = ()

    @property
    def matrices(self) -> int:
        """How many experts lie on top of each other in the weights."""
        return self.held or self.n_experts

    @property
    def computed(self) -> list[int]:
        """The experts whose part it gives, by their numbers in the whole; with slots, those at first."""
        if self.slots and not self.rest:
            return sorted(self.slots)
        if self.slots:
            return sorted({*range(self.n_experts)} - {*self.slots})
        found = self.numbers or range(self.first, self.first + self.matrices)
        return sorted({*found} - {*self.without})

    @property
    def variant(self) -> tuple[str, ...]:
        differs = self.scores != "softmax", self.activation != "silu", self.groups_used < self.groups
        words = (self.scores, self.activation, "groups")
        return (*(word for word, other in zip(words, differs, strict=True) if other), *self.more)

    def others(self, given: Sequence[Given]) -> dict[MoreWeight, Given]:
        """What only some mixtures have, of what is given for each of the weights."""
        return dict(zip(self.more, given[MIXTURE:], strict=True))


@dataclass(frozen=True, slots=True)
class EverySecond(Attrs):
    """Of 2 * `heads` slices of the columns every second one, from the `first` (0 or 1) on."""

    heads: int
    first: int


@dataclass(frozen=True, slots=True)
class PerHead(Attrs):
    """A matrix of its own for each of `heads` slices of the columns; the weight has one on top of the other.

    Multiplied are as many columns of a slice as the matrices have, from `first` on. With `passed` those after
    them come out as they are, in front of the slice's product; otherwise they are dropped.
    """

    heads: int
    first: int = 0
    passed: bool = False


@dataclass(frozen=True, slots=True)
class Rope(Attrs):
    """Rotate pairs of the first `n_rot` columns of each head by position / base^(2i / n_rot).

    `interleaved` pairs neighbours (2i, 2i+1), as GGUF permutes llama's weights; otherwise i and i + n_rot/2.
    `freq_scale` multiplies the angles (1/factor for linear scaling). With `ext_factor` > 0 the angles are
    YaRN's: a ramp between `beta_fast` and `beta_slow` rotations over `n_ctx_orig` tokens chooses between
    scaled and unscaled, and cos and sin are multiplied by attn_factor * (1 + 0.1 ln(1 / freq_scale)).
    An optional weight divides the angles (llama 3's frequency factors). `axis`: by which of a token's
    positions, where it has one in time, height and width.
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
    axis: int = 0


@dataclass(frozen=True, slots=True)
class Attention(Attrs):
    """Causal attention of q over the sequence's K and V, this step's k and v written first.

    Inputs are q, k and v. k and v have a row per token; q may have wanted rows only. With a `window` a token
    sees `window` tokens, itself included, and the cache keeps no more than those. With a `softcap` the scaled
    scores go through softcap * tanh(score / softcap). An optional weight are the heads' sinks: a score each,
    which takes its share of the softmax and adds no value.

    Some layers keep no keys and values of their own: they have q only, and `layer` is that of another layer,
    before them, which lends its own. In others, `latent`, keys are the values as well: inputs are q and k,
    and the cache keeps one row of a token.

    A share of a layer's attention has KV heads of its own, from `first` on among those of the layer: it
    writes and reads their columns of the KV rows only. The shares of a layer together have every head once.
    """

    layer: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    first: int = 0
    sharing: Literal["", "lends", "borrows", "latent"] = ""

    @property
    def n_inputs(self) -> int:
        """q, and what a layer keeps of its own."""
        return {"borrows": 1, "latent": 2}.get(self.sharing, 3)

    @property
    def variant(self) -> tuple[str, ...]:
        return (self.sharing,) if self.sharing in ("borrows", "latent") else ()


@dataclass(frozen=True, slots=True)
class Stateful(Attrs, ABC):
    """Of an op that keeps a state of a fixed size of each sequence: `floats` numbers in each layer."""

    layer: int

    @property
    @abstractmethod
    def floats(self) -> int:
        """Numbers that it keeps of a sequence."""


@dataclass(frozen=True, slots=True)
class CausalConv(Stateful):
    """Of each column the sum of its last `kernel` rows, times the weight's row of that column, plus what the
    second weight has of it, if there is one; with `silu` times the sigmoid of that.

    Its state are the last kernel - 1 rows, the oldest one first.
    """

    kernel: int
    width: int
    silu: bool = True

    @property
    def floats(self) -> int:
        return (self.kernel - 1) * self.width


@dataclass(frozen=True, slots=True)
class DeltaNet(Stateful):
    """The gated delta rule: each head of v keeps a matrix S [v_dim, k_dim], which every token changes.

    Inputs are q, k and v of each token side by side, then for each head of v a number of its decay and one
    of its learning rate. The heads of q and k are divided by their lengths, and q by sqrt(k_dim). With
    g = exp(decay * softplus(a + bias)) and beta = sigmoid(b), a token makes of S

        S = g * S + outer(beta * (v - g * S @ k), k)

    and its result is S @ q. The weights are the decays and the biases; with `log` the first is the logarithm
    of a decay without its sign, as Hugging Face stores it. Head j of v goes with head
    j // (v_heads / k_heads) of q and k or, `tiled`, with head j % k_heads.

    With `mamba` it is Mamba 2's scan (x is v, B is k, C is q, and dt both a and b): v, k and q lie in this
    order, keys and queries are as they are, beta is softplus(b + bias), and nothing is taken off v:

        S = g * S + outer(beta * v, k)

    A third weight, times v, is added to the result.

    Its state are the matrices of all heads, each row filled up to a multiple of `ROW` numbers.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    tiled: bool = False
    log: bool = False
    eps: float = 1e-6
    mamba: bool = False

    @property
    def variant(self) -> tuple[str, ...]:
        return ("mamba",) if self.mamba else ()

    @property
    def columns(self) -> tuple[int, int, int]:
        """Where q, k and v begin in a row."""
        if self.mamba:
            return self.v_width + self.k_width, self.v_width, 0
        return 0, self.k_width, 2 * self.k_width

    @property
    def k_width(self) -> int:
        """Columns of all heads of q, and of k."""
        return self.k_heads * self.k_dim

    @property
    def v_width(self) -> int:
        """Columns of all heads of v."""
        return self.v_heads * self.v_dim

    @property
    def row(self) -> int:
        """Numbers from one row of a head's matrix to the next."""
        return -(-self.k_dim // ROW) * ROW

    @property
    def floats(self) -> int:
        return self.v_width * self.row


ROW = 16  # numbers: what rows of a state are filled up to, so that vectors need no remainder


@dataclass(frozen=True, slots=True)
class OpForm:
    """Attributes and sizes of one op: widths of its inputs and of its result, shapes of its weights."""

    attrs: Attrs
    inputs: tuple[int, ...]
    weights: tuple[tuple[int, int], ...]
    out: int


Sizes = Iterator[tuple[str, object, object]]  # what it is, what it should be equal to


def _embed(f: OpForm) -> Sizes:
    yield "width of the table", f.weights[0][1], f.out


def _linear(f: OpForm) -> Sizes:
    yield "weight", f.weights[0], (f.out, f.inputs[0])
    if len(f.weights) > 1:
        yield "bias", f.weights[1], (1, f.out)


def _per_head(f: OpForm) -> Sizes:
    a, (rows, cols), (width,) = f.attrs, f.weights[0], f.inputs
    assert isinstance(a, PerHead)
    yield "input", width, width // a.heads * a.heads
    yield "weight", rows, rows // a.heads * a.heads
    behind = width // a.heads - a.first - cols
    yield "columns that are left in a head", behind, max(0, behind)
    yield "first column", a.first, max(0, a.first)
    yield "result", f.out, rows + (a.heads * behind if a.passed else 0)


def _rms_norm(f: OpForm) -> Sizes:
    a = f.attrs
    assert isinstance(a, RmsNorm)
    yield "input", f.inputs[0], f.out
    yield "width of all heads", f.out, f.out // a.heads * a.heads
    yield "weight", f.weights[0], (1, f.out // a.heads)


def _layer_norm(f: OpForm) -> Sizes:
    yield "input", f.inputs[0], f.out
    for weight in f.weights:
        yield "weight", weight, (1, f.out)


def _moe(f: OpForm) -> Sizes:
    a = f.attrs
    assert isinstance(a, Moe)
    for width in f.inputs:
        yield "input", width, f.out
    yield "number of inputs", len(f.inputs), min(2, len(f.inputs))
    yield "number of experts used", a.n_used, max(1, min(a.n_used, a.n_experts))
    yield "last expert", a.first + a.matrices, min(a.first + a.matrices, a.n_experts)
    if a.without:
        yield "number of experts held", a.held, 0
        left_out = sorted({e for e in a.without if 0 <= e < a.n_experts})
        yield "list of experts left out", a.without, tuple(left_out)
    if a.slots:
        yield "number of experts held beside slots", a.held, 0
        yield "number of experts left out beside slots", len(a.without), 0
        yield (
            "list of experts in slots",
            sorted(a.slots),
            sorted({e for e in a.slots if 0 <= e < a.n_experts}),
        )
    if a.numbers:
        yield "number of numbers of experts", len({*a.numbers}), a.held
    gate_up = (a.matrices * a.n_ff, f.out)
    shapes = {
        "router": (a.n_experts, f.out), "gate": gate_up, "up": gate_up, "down": (a.matrices * f.out, a.n_ff)
    }  # fmt: skip
    each = {"gate_bias": a.n_ff, "up_bias": a.n_ff, "down_bias": f.out}
    for name in a.more:
        shapes[name] = (a.n_experts, 1) if name in BY_ROUTER else (a.matrices, each[name])
    yield "number of weights", len(f.weights), len(shapes)
    for (what, shape), found in zip(shapes.items(), f.weights, strict=False):
        yield what, found, shape
    yield "number of groups", a.groups, math.gcd(a.groups, a.n_experts)
    yield "number of groups used", a.groups_used, max(1, min(a.groups_used, a.groups))
    yield "experts that a group is measured by", a.group_best, max(1, a.group_best)
    if a.groups > 1:
        size = a.n_experts // a.groups
        yield "experts that a group is measured by", a.group_best, min(a.group_best, size)
        yield "number of experts used", a.n_used, min(a.n_used, a.groups_used * size)


def _rope(f: OpForm) -> Sizes:
    a = f.attrs
    assert isinstance(a, Rope)
    yield "input", f.inputs[0], a.n_heads * a.head_dim
    yield "result", f.out, a.n_heads * a.head_dim
    yield "number of columns that turn", a.n_rot, min(a.n_rot, a.head_dim) // 2 * 2
    if f.weights:
        yield "weight", f.weights[0], (1, a.n_rot // 2)


def _attention(f: OpForm) -> Sizes:
    a = f.attrs
    assert isinstance(a, Attention)
    yield "number of query heads", a.n_heads, a.n_heads // a.n_kv_heads * a.n_kv_heads
    yield "number of inputs", len(f.inputs), a.n_inputs
    for what, width, heads in zip("qkv", f.inputs, (a.n_heads, a.n_kv_heads, a.n_kv_heads), strict=False):
        yield what, width, heads * a.head_dim
    yield "result", f.out, a.n_heads * a.head_dim
    for weight in f.weights:
        yield "sinks", weight, (1, a.n_heads)


def _causal_conv(f: OpForm) -> Sizes:
    a = f.attrs
    assert isinstance(a, CausalConv)
    yield "input", f.inputs[0], a.width
    yield "result", f.out, a.width
    yield "weight", f.weights[0], (a.width, a.kernel)
    for bias in f.weights[1:]:
        yield "bias", bias, (a.width, 1)


def _delta_net(f: OpForm) -> Sizes:
    a = f.attrs
    assert isinstance(a, DeltaNet)
    yield "number of heads of v", a.v_heads, a.v_heads // a.k_heads * a.k_heads
    widths = {"input": 2 * a.k_width + a.v_width, "decay": a.v_heads, "rate": a.v_heads}
    for (what, width), found in zip(widths.items(), f.inputs, strict=True):
        yield what, found, width
    for weight in f.weights:
        yield "weight", weight, (1, a.v_heads)
    yield "number of weights", len(f.weights), 3 if a.mamba else 2
    yield "result", f.out, a.v_width


def _sigmoid_gate(f: OpForm) -> Sizes:
    if f.inputs[0] != 1:  # one number for a whole row
        yield "gate", f.inputs[0], f.out
    yield "input", f.inputs[1], f.out


def _every_second(f: OpForm) -> Sizes:
    a = f.attrs
    assert isinstance(a, EverySecond)
    yield "input", f.inputs[0], 2 * f.out
    yield "width of all heads", f.out, f.out // a.heads * a.heads
    yield "first slice", a.first, min(1, max(0, a.first))


def _concat(f: OpForm) -> Sizes:
    yield "result", f.out, sum(f.inputs)


def _scale(f: OpForm) -> Sizes:
    yield from _elementwise(f)
    for weight in f.weights:
        yield "weight", weight, (1, 1)


def _elementwise(f: OpForm) -> Sizes:
    for width in f.inputs:
        yield "input", width, f.out


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One row of the table."""

    kind: str
    n_inputs: int
    n_weights: Container[int]
    attrs: type[Attrs]
    sizes: Callable[[OpForm], Sizes]
    meaning: str
    more_inputs: bool = False  # n_inputs is the least number


_ROWS = (
    OpSpec("embed", 0, (1,), Attrs, _embed, "rows of the weight, one for each token id of the step"),
    OpSpec("positions", 0, (1,), Positions, _embed, "rows of the weight, one for each token's position"),
    OpSpec("rms_norm", 1, (1,), RmsNorm, _rms_norm, "root mean square normalisation, times the weight"),
    OpSpec("layer_norm", 1, (0, 1, 2), LayerNorm, _layer_norm, "mean 0, variance 1, times weight, plus bias"),
    OpSpec("linear", 1, (1, 2), Attrs, _linear, "x @ weight.T, plus the second weight as a bias"),
    OpSpec("per_head", 1, (1,), PerHead, _per_head, "for each head x @ matrix.T, with a matrix of its own"),
    OpSpec("rope", 1, (0, 1), Rope, _rope, "rotary position embedding of each head"),
    OpSpec("attention", 1, (0, 1), Attention, _attention, "causal attention; writes K and V", True),
    OpSpec(
        "causal_conv", 1, (1, 2), CausalConv, _causal_conv, "a short convolution over time, most often silu"
    ),
    OpSpec(
        "delta_net", 3, (2, 3), DeltaNet, _delta_net, "the gated delta rule or Mamba 2's, over a state a head"
    ),
    OpSpec("moe", 1, range(MIXTURE, MIXTURE + 7), Moe, _moe, "a mixture of experts", True),
    OpSpec("swiglu", 2, (0,), Attrs, _elementwise, "silu(first) * second"),
    OpSpec("geglu", 2, (0,), Gelu, _elementwise, "gelu(first) * second"),
    OpSpec("sigmoid_gate", 2, (0,), Attrs, _sigmoid_gate, "sigmoid(first) * second; first may be one number"),
    OpSpec("multiply", 2, (0,), Attrs, _elementwise, "first * second"),
    OpSpec("gelu", 1, (0,), Gelu, _elementwise, "x * Phi(x)"),
    OpSpec("relu", 1, (0,), Attrs, _elementwise, "max(x, 0)"),
    OpSpec("scale", 1, (0, 1), Scale, _scale, "x * factor, times the weight if there is one"),
    OpSpec("grow", 1, (0,), Grow, _elementwise, "x * (1 + by * ln(1 + position // every))"),
    OpSpec("softcap", 1, (0,), Softcap, _elementwise, "cap * tanh(x / cap)"),
    OpSpec("add", 2, (0,), Attrs, _elementwise, "first + second"),
    OpSpec("every_second", 1, (0,), EverySecond, _every_second, "every second slice of the columns"),
    OpSpec("concat", 2, (0,), Attrs, _concat, "the columns of each, one behind the other", more_inputs=True),
    OpSpec("select", 1, (0,), Attrs, _elementwise, "the wanted rows of a value with a row for each token"),
    OpSpec("head", 1, (1, 2), Attrs, _linear, "as linear: to a logit for each token of the vocabulary"),
)

OPS: dict[str, OpSpec] = {row.kind: row for row in _ROWS}
NONE = Attrs()


def flops(kind: str, attrs: Attrs, weights: Sequence[tuple[int, int]], rows: int) -> int:
    """Multiplications and additions in products; other kinds are bound by memory and count as 0."""
    if kind not in ("linear", "head", "moe", "per_head"):
        return 0
    first, *others = (n_out * n_in for n_out, n_in in weights)
    if isinstance(attrs, Moe):
        first += sum(others[: MIXTURE - 1]) * attrs.n_used // attrs.n_experts
    return 2 * first * rows
