"""What Qwen 3.5 and its relatives share: gated delta nets in most layers, gated attention in the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Value, Weight, stack
from hetrun.graph.ops import NONE, CausalConv, DeltaNet, EverySecond, Moe, Rope
from hetrun.models import blocks
from hetrun.models.decoder import count_layers, read_heads
from hetrun.models.rope import check_rope, factors, read_rope, read_sections

INTERVAL = 4  # layers, of which the last has attention, where the settings say nothing

FeedForward = Callable[[Value, int], Value]  # the normed stream and the layer's number


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The settings of such a model."""

    n_vocab: int
    width: int
    eps: float
    norm_offset: float  # what is added to each norm's gain, but the delta nets' own
    attention: blocks.AttentionShape
    rope: Rope
    factors: str
    sections: tuple[int, ...]  # pairs that turn by time, height and width
    recurrent: tuple[bool, ...]  # which layers have a delta net
    delta: DeltaNet
    kernel: int


def read_hybrid(b: GraphBuilder, meta: ModelMeta, tiled: bool) -> Hybrid:
    """The settings as GGUF names them; `tiled`: how GGUF orders the heads of v in this architecture."""
    heads = read_heads(b, meta)
    rope = read_rope(meta, heads.n_heads, heads.head_dim, interleaved=False)
    check_rope(b, meta, rope)
    eps = meta.get_float("attention.layer_norm_rms_epsilon", 1e-6)
    b.check(eps >= 0, f"attention.layer_norm_rms_epsilon is {eps}")
    k_heads = meta.require_int("ssm.group_count", 1, 1 << 12)
    v_heads = meta.require_int("ssm.time_step_rank", 1, 1 << 12)
    inner = meta.require_int("ssm.inner_size", 1, 1 << 20)
    b.check(inner % v_heads == 0, f"ssm.inner_size is {inner}, which {v_heads} heads cannot share")
    b.check(v_heads % k_heads == 0, f"{v_heads} heads of v cannot share {k_heads} of k in a delta net")
    return Hybrid(
        n_vocab=meta.require_int("vocab_size", 1, 1 << 24),
        width=meta.require_int("embedding_length", 1, 1 << 20),
        eps=eps,
        norm_offset=meta.get_float("norm.offset", 0.0),
        attention=heads,
        rope=rope,
        factors=factors(b, meta, rope),
        sections=read_sections(b, meta, rope),
        recurrent=read_recurrent(b, meta),
        delta=DeltaNet(
            layer=0,
            k_heads=k_heads,
            v_heads=v_heads,
            k_dim=meta.require_int("ssm.state_size", 1, 1 << 12),
            v_dim=inner // v_heads,
            tiled=tiled and not meta.get_bool("ssm.grouped", False),
            log=meta.get_bool("ssm.log", False),
        ),
        kernel=meta.require_int("ssm.conv_kernel", 2, 64),
    )


def read_recurrent(b: GraphBuilder, meta: ModelMeta) -> tuple[bool, ...]:
    """Which layers have a delta net: a truth for each, else all but the last of each interval."""
    n, layers = meta.require_int("block_count", 1, 1 << 12), count_layers(b, meta)
    found = meta.get_numbers("attention.recurrent_layers", n)
    interval = meta.get_int("full_attention_interval", INTERVAL, 1, 1 << 12)
    each = found or [(i + 1) % interval != 0 for i in range(n)]
    return tuple(bool(recurrent) for recurrent in each)[:layers]


def build_hybrid(b: GraphBuilder, c: Hybrid, feed_forward: FeedForward) -> Graph:
    """The forward step."""
    x = blocks.embed(b, "token_embd.weight", c.n_vocab, c.width)
    for i in range(len(c.recurrent)):
        x = layer(b, x, c, i, feed_forward)
    with b.scope("output"):
        hidden = norm(b, x, "output_norm", c)
        logits = blocks.head(b, hidden, c.n_vocab)
    return b.finish(hidden, logits)


def layer(b: GraphBuilder, x: Value, c: Hybrid, i: int, feed_forward: FeedForward) -> Value:
    """A delta net or attention, and feed-forward."""
    with b.scope(f"blk.{i}.attn"):
        x = delta_net(b, x, c, i) if c.recurrent[i] else gated_attention(b, x, c, i)
    with b.scope(f"blk.{i}.ffn"):
        h = norm(b, x, f"blk.{i}.post_attention_norm", c)
        return blocks.add(b, x, feed_forward(h, i), part="down")


def norm(b: GraphBuilder, x: Value, name: str, c: Hybrid, part: str = "norm", heads: int = 1) -> Value:
    """A norm whose gain Hugging Face stores less 1."""
    return blocks.rms_norm(b, x, f"{name}.weight", c.eps, part, heads, c.norm_offset)


def gated_attention(b: GraphBuilder, x: Value, c: Hybrid, i: int) -> Value:
    """x + out(sigmoid(gate) * attention); q and its gate come from one weight, head by head."""
    shape, blk = c.attention, f"blk.{i}"
    h = norm(b, x, f"{blk}.attn_norm", c)
    k = blocks.linear(b, h, f"{blk}.attn_k", shape.kv_width, "k")
    v = blocks.linear(b, h, f"{blk}.attn_v", shape.kv_width, "v")
    if i == len(c.recurrent) - 1:
        h, x = blocks.select(b, h), blocks.select(b, x)
    both = blocks.linear(b, h, f"{blk}.attn_q", 2 * shape.width, "q")
    q, gate = every_second(b, both, shape.n_heads, "q")
    q = norm(b, q, f"{blk}.attn_q_norm", c, "q", shape.n_heads)
    k = norm(b, k, f"{blk}.attn_k_norm", c, "k", shape.n_kv_heads)
    q = blocks.turn(b, q, c.rope, c.factors, c.sections, "q")
    k = blocks.turn(b, k, replace(c.rope, n_heads=shape.n_kv_heads), c.factors, c.sections, "k")
    a = blocks.attend(b, q, k, v, i, shape)
    a = b.op("sigmoid_gate", [gate, a], [], NONE, shape.width, part="score")
    return blocks.add(b, x, blocks.linear(b, a, f"{blk}.attn_output", x.width, "out"), part="out")


def delta_net(b: GraphBuilder, x: Value, c: Hybrid, i: int) -> Value:
    """x + out(norm(delta(conv(q, k, v))) * silu(z)); of the last layer only the wanted rows go on."""
    d, blk = replace(c.delta, layer=i), f"blk.{i}"
    h = norm(b, x, f"{blk}.attn_norm", c)
    qkv, decay, rate = projections(b, h, d, blk)
    conv = CausalConv(i, c.kernel, qkv.width)
    kernel = b.weight(f"{blk}.ssm_conv1d.weight", qkv.width, c.kernel)
    qkv = b.op("causal_conv", [qkv], [kernel], conv, qkv.width, part="score")
    vectors = [b.weight(f"{blk}.{name}", 1, d.v_heads) for name in ("ssm_a", "ssm_dt.bias")]
    y = b.op("delta_net", [qkv, decay, rate], vectors, d, d.v_width, part="score")
    if i == len(c.recurrent) - 1:
        h, x, y = (blocks.select(b, value) for value in (h, x, y))
    z = gate(b, h, d, blk)
    y = blocks.rms_norm(b, y, f"{blk}.ssm_norm.weight", c.eps, "score", d.v_heads)
    y = b.op("swiglu", [z, y], [], NONE, d.v_width, part="score")
    return blocks.add(b, x, blocks.linear(b, y, f"{blk}.ssm_out", x.width, "out"), part="out")


def projections(b: GraphBuilder, h: Value, d: DeltaNet, blk: str) -> tuple[Value, Value, Value]:
    """q, k and v as one; of each head of v its decay and its learning rate.

    Their parts of the layer are named after what attention has in their place: planners place by that.
    """
    width = 2 * d.k_width + d.v_width
    if b.has(f"{blk}.ssm_in.weight"):  # everything of a head of k together
        qkv = product(b, h, rows_of_heads(b, h, d, blk, gate=False), "q")
    else:
        qkv = blocks.linear(b, h, f"{blk}.attn_qkv", width, "q")
    if not b.has(f"{blk}.ssm_ba.weight"):
        decay = blocks.linear(b, h, f"{blk}.ssm_alpha", d.v_heads, "k")
        return qkv, decay, blocks.linear(b, h, f"{blk}.ssm_beta", d.v_heads, "v")
    both = blocks.linear(b, h, f"{blk}.ssm_ba", 2 * d.v_heads, "k")
    rate, decay = every_second(b, both, d.k_heads, "k")
    return qkv, decay, rate


def gate(b: GraphBuilder, h: Value, d: DeltaNet, blk: str) -> Value:
    """z, by which the result is gated."""
    if b.has(f"{blk}.ssm_in.weight"):
        return product(b, h, rows_of_heads(b, h, d, blk, gate=True), "q")
    return blocks.linear(b, h, f"{blk}.attn_gate", d.v_width, "q")


def every_second(b: GraphBuilder, x: Value, heads: int, part: str) -> list[Value]:
    """Two values whose heads lie in turn."""
    n = x.width // 2
    return [b.op("every_second", [x], [], EverySecond(heads, first), n, part=part) for first in (0, 1)]


def product(b: GraphBuilder, x: Value, weight: Weight, part: str) -> Value:
    """A projection by some rows of a weight."""
    return b.op("linear", [x], [weight], NONE, weight.shape[0], part=part)


def rows_of_heads(b: GraphBuilder, h: Value, d: DeltaNet, blk: str, gate: bool) -> Weight:
    """The rows of q, k and v, or of z, in the weight that has those of each head of k together."""
    values = d.v_width // d.k_heads
    each = 2 * d.k_dim + 2 * values
    whole = b.weight(f"{blk}.ssm_in.weight", d.k_heads * each, h.width)
    return heads_apart(whole, d.k_heads, d.k_dim, values)[gate]


def heads_apart(whole: Weight, k_heads: int, k_dim: int, values: int) -> tuple[Weight, Weight]:
    """Of a weight with q, k, v and z of each head of k in turn: q, k, v of all heads, and z of all."""
    starts = {"q": 0, "k": k_dim, "v": 2 * k_dim, "z": 2 * k_dim + values}
    sizes = {"q": k_dim, "k": k_dim, "v": values, "z": values}
    each = sum(sizes.values())
    parts = {
        what: [whole.rows(h * each + start, h * each + start + sizes[what]) for h in range(k_heads)]
        for what, start in starts.items()
    }
    qkv, z = [*parts["q"], *parts["k"], *parts["v"]], parts["z"]
    return replace(stack(qkv), name=f"{whole.name}[q, k, v]"), replace(stack(z), name=f"{whole.name}[z]")


def shared_mixture(b: GraphBuilder, x: Value, prefix: str, moe: Moe, n_ff_shared: int) -> Value:
    """A mixture, and beside it an expert through which every row goes, with a gate of its own."""
    y = blocks.mixture(b, x, prefix, moe)
    if not b.has(f"{prefix}.ffn_gate_shexp.weight"):
        return y
    shared = blocks.gated_ffn(b, x, prefix, n_ff_shared, suffix="_shexp")
    share = blocks.linear(b, x, f"{prefix}.ffn_gate_inp_shexp", 1, "down")
    return blocks.add(b, y, b.op("sigmoid_gate", [share, shared], [], NONE, x.width, part="down"), "down")


def read_moe(b: GraphBuilder, meta: ModelMeta) -> tuple[Moe, int]:
    """The mixture of every layer, and the width of its shared expert."""
    n_experts = meta.require_int("expert_count", 1, 1 << 16)
    n_used = meta.require_int("expert_used_count", 1, n_experts)
    n_ff = meta.require_int("expert_feed_forward_length", 1, 1 << 24)
    shared = meta.get_int("expert_shared_feed_forward_length", n_ff, 0, 1 << 24)
    return Moe(n_experts, n_used, n_ff, normalise=meta.get_bool("expert_weights_norm", True)), shared
