"""What the architectures share: norms, projections, attention and feed-forward, in the papers' words."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun.graph import GraphBuilder, Value
from hetrun.ops import NONE, Attention, Attrs, RmsNorm, Rope


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one attention block."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float


def embed(b: GraphBuilder, name: str, n_vocab: int, width: int) -> Value:
    """Token ids to vectors."""
    with b.scope("embed"):
        return b.op("embed", [], [b.weight(name, n_vocab, width)], NONE, width)


def rms_norm(b: GraphBuilder, x: Value, name: str, eps: float, part: str = "norm") -> Value:
    """Root mean square normalisation with a learned gain."""
    return b.op("rms_norm", [x], [b.weight(name, 1, x.width)], RmsNorm(eps), x.width, part=part)


def linear(b: GraphBuilder, x: Value, name: str, n_out: int, part: str, kind: str = "linear") -> Value:
    """A projection by the weight `name`.weight, with `name`.bias where the model has one."""
    weights = [b.weight(f"{name}.weight", n_out, x.width)]
    if b.has(f"{name}.bias"):
        weights.append(b.weight(f"{name}.bias", 1, n_out))
    return b.op(kind, [x], weights, NONE, n_out, part=part)


def rope(b: GraphBuilder, x: Value, attrs: Rope, factors: str, part: str) -> Value:
    """Rotary embedding, with the model's frequency factors where it has them."""
    weights = [b.weight(factors, 1, attrs.n_rot // 2)] if b.has(factors) else []
    return b.op("rope", [x], weights, attrs, x.width, part=part)


def attend(b: GraphBuilder, q: Value, k: Value, v: Value, layer: int, shape: AttentionShape) -> Value:
    """Attention over everything the sequence has seen."""
    attrs = Attention(layer, shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.scale)
    return b.op("attention", [q, k, v], [], attrs, shape.n_heads * shape.head_dim, part="score")


def gated_ffn(b: GraphBuilder, x: Value, prefix: str, n_ff: int, gate: str = "swiglu") -> Value:
    """down(act(gate(x)) * up(x))."""
    g = linear(b, x, f"{prefix}.ffn_gate", n_ff, "gate")
    u = linear(b, x, f"{prefix}.ffn_up", n_ff, "up")
    h = b.op(gate, [g, u], [], NONE, n_ff, part="up")
    return linear(b, h, f"{prefix}.ffn_down", x.width, "down")


def add(b: GraphBuilder, x: Value, y: Value, part: str = "") -> Value:
    """The residual stream."""
    return b.op("add", [x, y], [], NONE, x.width, part=part)


def select(b: GraphBuilder, x: Value) -> Value:
    """Only the rows that somebody wants."""
    return b.op("select", [x], [], Attrs(), x.width, rows="wanted", part="norm")
