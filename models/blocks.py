"""What the architectures share: norms, projections, attention and feed-forward, in the papers' words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hetrun.graph import GraphBuilder, Value, Weight, constant, stack
from hetrun.graph.ops import (
    BY_ROUTER,
    NONE,
    Attention,
    Attrs,
    Gelu,
    LayerNorm,
    Moe,
    MoreWeight,
    RmsNorm,
    Rope,
    Scale,
    Softcap,
)
from hetrun.models.rope import neutral, others_still


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one attention block; a window of 0 is none."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0

    @property
    def width(self) -> int:
        """Columns of q and of the result."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of k and of v."""
        return self.n_kv_heads * self.head_dim


def embed(b: GraphBuilder, name: str, n_vocab: int, width: int) -> Value:
    """Token ids to vectors."""
    with b.scope("embed"):
        return b.op("embed", [], [b.weight(name, n_vocab, width)], NONE, width)


def rms_norm(b: GraphBuilder, x: Value, name: str, eps: float, part: str = "norm", heads: int = 1,
             offset: float = 0.0) -> Value:  # fmt: skip
    """Root mean square normalisation with a learned gain; with `heads` each of them by itself."""
    weight = b.weight(name, 1, x.width // heads)
    return b.op("rms_norm", [x], [weight], RmsNorm(eps, offset, heads), x.width, part=part)


def plain_norm(b: GraphBuilder, x: Value, eps: float, part: str = "", heads: int = 1) -> Value:
    """The same without a gain."""
    width = x.width // heads
    ones = constant(f"ones of {width}", np.ones(width, np.float32))
    return b.op("rms_norm", [x], [ones], RmsNorm(eps, heads=heads), x.width, part=part)


def layer_norm(b: GraphBuilder, x: Value, name: str, eps: float, part: str = "norm") -> Value:
    """Layer normalisation, with the learned gain and bias that the model has."""
    names = [f"{name}.{kind}" for kind in ("weight", "bias")]
    weights = [b.weight(n, 1, x.width) for n in names if b.has(n)]
    return b.op("layer_norm", [x], weights, LayerNorm(eps), x.width, part=part)


def linear(b: GraphBuilder, x: Value, name: str, n_out: int, part: str, kind: str = "linear") -> Value:
    """A projection by the weight `name`.weight, with `name`.bias where the model has one."""
    weights = [b.weight(f"{name}.weight", n_out, x.width)]
    if b.has(f"{name}.bias"):
        weights.append(b.weight(f"{name}.bias", 1, n_out))
    return b.op(kind, [x], weights, NONE, n_out, part=part)


def qkv(b: GraphBuilder, x: Value, blk: str, shape: AttentionShape, part: Literal["q", "k", "v"]) -> Value:
    """The projection to q, k or v, by a weight of its own or by some rows of one for all three."""
    widths = {"q": shape.width, "k": shape.kv_width, "v": shape.kv_width}
    name, width = f"{blk}.attn_qkv", widths[part]
    if not b.has(f"{name}.weight"):
        return linear(b, x, f"{blk}.attn_{part}", width, part)
    a = {"q": 0, "k": shape.width, "v": shape.width + shape.kv_width}[part]
    total = sum(widths.values())
    weights = [b.weight(f"{name}.weight", total, x.width).rows(a, a + width)]
    if b.has(f"{name}.bias"):
        weights.append(b.weight(f"{name}.bias", 1, total).cols(a, a + width))
    return b.op("linear", [x], weights, NONE, width, part=part)


def rope(b: GraphBuilder, x: Value, attrs: Rope, factors: str | Weight, part: str) -> Value:
    """Rotary embedding, with the model's frequency factors where it has them, or with these."""
    if isinstance(factors, Weight):
        weights = [factors]
    else:
        weights = [b.weight(factors, 1, attrs.n_rot // 2)] if b.has(factors) else []
    return b.op("rope", [x], weights, attrs, x.width, part=part)


def turn(
    b: GraphBuilder, x: Value, attrs: Rope, factors: str | Weight, sections: Sequence[int], part: str
) -> Value:
    """Rope; where tokens have positions in height and width, each of its pairs by one of the three."""
    if not b.spatial or not sections:
        return rope(b, x, attrs, factors, part)
    for axis, still in enumerate(others_still(sections, attrs.n_rot // 2)):
        one = replace(attrs, axis=axis, attn_factor=attrs.attn_factor if not axis else neutral(attrs))
        x = b.op("rope", [x], [constant(f"rope of axis {axis}", still)], one, x.width, part=part)
    return x


def attend(
    b: GraphBuilder, q: Value, k: Value, v: Value, layer: int, shape: AttentionShape, sinks: str = "",
    lends: bool = False,
) -> Value:  # fmt: skip
    """Attention over everything the sequence has seen; `sinks`: the tensor of its heads'; `lends`: whether
    later layers have the same keys and values."""
    weights = [b.weight(sinks, 1, shape.n_heads)] if sinks else []
    attrs = attention_attrs(layer, shape, "lends" if lends else "")
    return b.op("attention", [q, k, v], weights, attrs, shape.width, part="score")


def attend_borrowed(b: GraphBuilder, q: Value, layer: int, shape: AttentionShape) -> Value:
    """Attention over the keys and values of a layer before."""
    return b.op("attention", [q], [], attention_attrs(layer, shape, "borrows"), shape.width, part="score")


def attend_latent(b: GraphBuilder, q: Value, k: Value, layer: int, shape: AttentionShape) -> Value:
    """Attention over keys that are the values as well."""
    return b.op("attention", [q, k], [], attention_attrs(layer, shape, "latent"), shape.width, part="score")


def attention_attrs(
    layer: int, shape: AttentionShape, sharing: Literal["", "lends", "borrows", "latent"]
) -> Attention:
    """A block's numbers as the op has them."""
    numbers = (shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.scale, shape.window)
    return Attention(layer, *numbers, sharing=sharing)


def head(b: GraphBuilder, hidden: Value, n_vocab: int, softcap: float = 0.0, scale: float = 1.0) -> Value:
    """Logits, by a matrix of their own or by that of the embeddings, then scaled; a softcap of 0 is none."""
    name = "output" if b.has("output.weight") else "token_embd"
    logits = scaled(b, linear(b, hidden, name, n_vocab, "head", kind="head"), scale, "head")
    if not softcap:
        return logits
    return b.op("softcap", [logits], [], Softcap(softcap), n_vocab, part="head")


def gated_ffn(
    b: GraphBuilder, x: Value, prefix: str, n_ff: int, gate: str = "swiglu", suffix: str = ""
) -> Value:
    """down(act(gate(x)) * up(x)); `suffix`: what ends the names of its tensors."""
    g = linear(b, x, f"{prefix}.ffn_gate{suffix}", n_ff, "gate")
    u = linear(b, x, f"{prefix}.ffn_up{suffix}", n_ff, "up")
    h = b.op(gate, [g, u], [], Gelu() if gate == "geglu" else NONE, n_ff, part="up")
    return linear(b, h, f"{prefix}.ffn_down{suffix}", x.width, "down")


def fused_ffn(b: GraphBuilder, x: Value, prefix: str, n_ff: int) -> Value:
    """down(silu(gate(x)) * up(x)), gate and up on top of each other in one weight."""
    both = b.weight(f"{prefix}.ffn_up.weight", 2 * n_ff, x.width)
    g = b.op("linear", [x], [both.rows(0, n_ff)], NONE, n_ff, part="gate")
    u = b.op("linear", [x], [both.rows(n_ff, 2 * n_ff)], NONE, n_ff, part="up")
    h = b.op("swiglu", [g, u], [], NONE, n_ff, part="up")
    return linear(b, h, f"{prefix}.ffn_down", x.width, "down")


MORE: Mapping[MoreWeight, str] = {
    "router_bias": "ffn_gate_inp.bias",
    "choice_bias": "exp_probs_b.bias",
    "gate_bias": "ffn_gate_exps.bias",
    "up_bias": "ffn_up_exps.bias",
    "down_bias": "ffn_down_exps.bias",
    "expert_scale": "ffn_down_exps.scale",
}  # as GGUF names them


def mixture(b: GraphBuilder, x: Value, prefix: str, moe: Moe, looked_at: Value | None = None) -> Value:
    """The experts that the router likes best, which may look at another value."""
    weights = [b.weight(f"{prefix}.ffn_gate_inp.weight", moe.n_experts, x.width)]
    for part, rows, cols in (
        ("gate", moe.n_ff, x.width),
        ("up", moe.n_ff, x.width),
        ("down", x.width, moe.n_ff),
    ):
        weights.append(experts(b, f"{prefix}.ffn_{part}", moe.n_experts, rows, cols))
    widths = {"gate_bias": moe.n_ff, "up_bias": moe.n_ff, "down_bias": x.width}
    for more in moe.more:
        tensor = f"{prefix}.{MORE[more]}"
        if more in BY_ROUTER:
            weights.append(b.weight(tensor, 1, moe.n_experts).upright)
        else:
            weights.append(b.weight(tensor, moe.n_experts, widths[more]))
    inputs = [x] if looked_at is None else [x, looked_at]
    return b.op("moe", inputs, weights, moe, x.width, part="exp")


def experts(b: GraphBuilder, name: str, n: int, rows: int, cols: int) -> Weight:
    """The matrices of all experts on top of each other; GGUF's first mixtrals have each by itself."""
    whole = f"{name}_exps.weight"
    if b.has(both := f"{name.rpartition('_')[0]}_gate_up_exps.weight") and not name.endswith("down"):
        pairs = b.weight(both, 2 * n * rows, cols)
        mine = pairs.blocks(range(name.endswith("up"), 2 * n, 2), rows, "halves")
        return replace(mine, name=whole)
    if b.has(whole) or not b.has(f"{name}.0.weight"):
        return b.weight(whole, n * rows, cols)
    each = [b.weight(f"{name}.{e}.weight", rows, cols) for e in range(n)]
    b.check(len({w.quant for w in each}) == 1, f"the experts of {name} are of several types")
    return replace(stack(each), name=whole)


def add(b: GraphBuilder, x: Value, y: Value, part: str = "") -> Value:
    """The residual stream."""
    return b.op("add", [x, y], [], NONE, x.width, part=part)


def scaled(b: GraphBuilder, x: Value, factor: float, part: str = "") -> Value:
    """x * factor, or x itself."""
    return x if factor == 1 else b.op("scale", [x], [], Scale(factor), x.width, part=part)


def select(b: GraphBuilder, x: Value) -> Value:
    """Only the rows that are wanted."""
    return b.op("select", [x], [], Attrs(), x.width, rows="wanted", part="norm")
