"""Gemma 4: heads of two sizes, layers that use another's keys and values, embeddings for each layer, and a
mixture beside the usual feed-forward part."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Value
from hetrun.graph.ops import NONE, Gelu, Moe, Rope, Scale
from hetrun.models import blocks, gemma4_import
from hetrun.models.decoder import count_layers, read_pattern, read_softcap
from hetrun.models.gemma3 import PERIOD
from hetrun.models.gemma4_import import shared_source
from hetrun.models.rope import check_rope, factors, read_rope

name = "gemma4"
from_hf = gemma4_import.from_hf


@dataclass(frozen=True, slots=True)
class Gemma4Layer:
    """What differs from layer to layer."""

    attention: blocks.AttentionShape
    rope: Rope
    factors: str  # the tensor that divides rope's angles; it may be missing
    n_ff: int
    kv: int  # the layer whose keys and values it has


@dataclass(frozen=True, slots=True)
class Gemma4:
    """The settings of such a model."""

    n_vocab: int
    width: int
    eps: float
    softcap: float  # of the logits; 0 is none
    own: int  # columns of each layer's own embeddings; 0: it has none
    layers: tuple[Gemma4Layer, ...]
    moe: Moe | None

    @property
    def last_kv(self) -> int:
        """The last layer with keys and values of its own: after it only wanted rows go on."""
        return max(layer.kv for layer in self.layers)


@dataclass(slots=True)
class Gemma4Rows:
    """What goes from layer to layer."""

    x: Value
    embedded: Value  # tokens as they were looked up
    own: list[Value]  # rows of each layer's own table

    def select(self, b: GraphBuilder, i: int) -> None:
        """Only wanted rows go on, from this layer on."""
        self.x = blocks.select(b, self.x)
        if self.own:
            self.embedded = blocks.select(b, self.embedded)
            self.own[i:] = [blocks.select(b, value) for value in self.own[i:]]


def read_config(b: GraphBuilder, meta: ModelMeta) -> Gemma4:
    """The settings as GGUF names them."""
    eps = meta.get_float("attention.layer_norm_rms_epsilon", 1e-6)
    b.check(eps >= 0, f"attention.layer_norm_rms_epsilon is {eps}")
    return Gemma4(
        n_vocab=meta.require_int("vocab_size", 1, 1 << 24),
        width=meta.require_int("embedding_length", 1, 1 << 20),
        eps=eps,
        softcap=read_softcap(b, meta),
        own=meta.get_int("embedding_length_per_layer_input", 0, 0, 1 << 16),
        layers=read_layers(b, meta),
        moe=read_moe(meta),
    )


def read_moe(meta: ModelMeta) -> Moe | None:
    """The mixture of every layer, where the model has one."""
    n = meta.get_int("expert_count", 0, 0, 1 << 16)
    if not n:
        return None
    used = meta.require_int("expert_used_count", 1, n)
    n_ff = meta.require_int("expert_feed_forward_length", 1, 1 << 24)
    return Moe(n, used, n_ff, normalise=True, activation="gelu", more=("expert_scale",))


def read_layers(b: GraphBuilder, meta: ModelMeta) -> tuple[Gemma4Layer, ...]:
    """Layers that see all, and those with a window, whose heads are smaller."""
    n = count_layers(b, meta)
    slides = read_pattern(meta, n, PERIOD)
    shared = meta.get_int("attention.shared_kv_layers", 0, 0, n - 1)
    window = meta.get_int("attention.sliding_window", 0, 0, 1 << 31)
    n_heads = meta.require_int("attention.head_count", 1, 1 << 14)
    kv_heads = meta.get_numbers("attention.head_count_kv", n) or (n_heads,) * n
    n_ff = meta.get_numbers("feed_forward_length", n) or ()
    b.check(len(n_ff) == n, "feed_forward_length is missing")
    b.check(all(1 <= k <= n_heads and n_heads % k == 0 for k in kv_heads),
            f"{n_heads} heads cannot share the KV heads that attention.head_count_kv says")  # fmt: skip
    full = meta.require_int("attention.key_length", 1, 1 << 12)
    near = meta.get_int("attention.key_length_swa", full, 1, 1 << 12)
    far_rope = read_rope(meta, n_heads, full, interleaved=False)
    check_rope(b, meta, far_rope)
    base = meta.get_float("rope.freq_base_swa", 10000.0)
    b.check(base > 0, f"rope.freq_base_swa is {base}")
    turned = meta.get_int("rope.dimension_count_swa", near, 2, near)
    near_rope = Rope(n_heads, near, turned, base, interleaved=False)
    sources = shared_source(slides, shared)
    b.check(None not in sources, "no layer lends keys and values to some of those that share them")
    found = []
    for i, slide in enumerate(slides):
        shape = blocks.AttentionShape(n_heads, int(kv_heads[i]), near if slide else full, 1.0)
        kv = sources[i]
        assert kv is not None
        found.append(
            Gemma4Layer(
                replace(shape, window=window if slide else 0),
                near_rope if slide else far_rope,
                "" if slide else factors(b, meta, far_rope),
                max(1, int(n_ff[i])),
                kv,
            )
        )
    return tuple(found)


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    c = read_config(b, meta)
    x = blocks.embed(b, "token_embd.weight", c.n_vocab, c.width)
    with b.scope("embed"):
        x = b.op("scale", [x], [], Scale(math.sqrt(c.width)), c.width)
    n, own = len(c.layers), []
    if c.own:
        table = b.weight("per_layer_token_embd.weight", c.n_vocab, n * c.own)
        own = [*b.table(table, n, math.sqrt(c.own))]
    rows = Gemma4Rows(x, x, own)
    for i in range(n):
        with b.scope(f"blk.{i}.attn"):
            attention(b, rows, c, i)
        with b.scope(f"blk.{i}.ffn"):
            rows.x = feed_forward(b, rows.x, c, i)
            if c.own:
                rows.x = with_own(b, rows, c, i)
            if b.has(f"blk.{i}.layer_output_scale.weight"):
                scale = b.weight(f"blk.{i}.layer_output_scale.weight", 1, 1)
                rows.x = b.op("scale", [rows.x], [scale], Scale(1.0), c.width, part="down")
    with b.scope("output"):
        hidden = norm(b, rows.x, "output_norm", c)
        logits = blocks.head(b, hidden, c.n_vocab, c.softcap)
    # Rows of a picture see each other where a window is seen, and in other layers as tokens do.
    return replace(b.finish(hidden, logits), whole="windows")


def norm(b: GraphBuilder, x: Value, tensor: str, c: Gemma4, part: str = "norm", heads: int = 1) -> Value:
    """The norm with a tensor's gain."""
    return blocks.rms_norm(b, x, f"{tensor}.weight", c.eps, part, heads)


def attention(b: GraphBuilder, rows: Gemma4Rows, c: Gemma4, i: int) -> None:
    """x + norm(attention(norm(x)))."""
    layer, blk = c.layers[i], f"blk.{i}"
    shape, h = layer.attention, norm(b, rows.x, f"blk.{i}.attn_norm", c)
    k, v = keys_and_values(b, h, c, i) if layer.kv == i else (None, None)
    if i == c.last_kv:
        h = blocks.select(b, h)
        rows.select(b, i)
    q = blocks.qkv(b, h, blk, shape, "q")
    q = norm(b, q, f"{blk}.attn_q_norm", c, "q", shape.n_heads)
    q = blocks.rope(b, q, layer.rope, layer.factors, "q")
    if k is None or v is None:
        a = blocks.attend_borrowed(b, q, layer.kv, shape)
    else:
        lends = any(other.kv == i for other in c.layers[i + 1 :])
        a = blocks.attend(b, q, k, v, i, shape, lends=lends)
    a = blocks.linear(b, a, f"{blk}.attn_output", c.width, "out")
    rows.x = blocks.add(b, rows.x, norm(b, a, f"{blk}.post_attention_norm", c, "out"), part="out")


def keys_and_values(b: GraphBuilder, h: Value, c: Gemma4, i: int) -> tuple[Value, Value]:
    """Keys normed and turned, values normed without a gain; some layers make both by one matrix."""
    layer, blk = c.layers[i], f"blk.{i}"
    shape = layer.attention
    both = k = blocks.qkv(b, h, blk, shape, "k")
    if b.has(f"{blk}.attn_qkv.weight") or b.has(f"{blk}.attn_v.weight"):
        both = blocks.qkv(b, h, blk, shape, "v")
    k = norm(b, k, f"{blk}.attn_k_norm", c, "k", shape.n_kv_heads)
    k = blocks.rope(b, k, replace(layer.rope, n_heads=shape.n_kv_heads), layer.factors, "k")
    return k, blocks.plain_norm(b, both, c.eps, "v", shape.n_kv_heads)


def feed_forward(b: GraphBuilder, x: Value, c: Gemma4, i: int) -> Value:
    """x + norm(feed forward(norm(x))), with a mixture beside it where the model has one."""
    blk = f"blk.{i}"
    h = blocks.gated_ffn(b, norm(b, x, f"{blk}.ffn_norm", c), blk, c.layers[i].n_ff, gate="geglu")
    if c.moe:
        h = norm(b, h, f"{blk}.post_ffw_norm_1", c, "down")
        h = blocks.add(b, h, experts(b, x, c.moe, c, blk), part="down")
    return blocks.add(b, x, norm(b, h, f"{blk}.post_ffw_norm", c, "down"), part="down")


def experts(b: GraphBuilder, x: Value, moe: Moe, c: Gemma4, blk: str) -> Value:
    """What the mixture makes of the stream; its router has a norm of its own."""
    looked_at = blocks.rms_norm(b, x, f"{blk}.ffn_gate_inp.scale", c.eps, "router")
    looked_at = blocks.scaled(b, looked_at, 1 / math.sqrt(c.width), "router")
    y = blocks.mixture(b, norm(b, x, f"{blk}.pre_ffw_norm_2", c, "router"), blk, moe, looked_at)
    return norm(b, y, f"{blk}.post_ffw_norm_2", c, "down")


def with_own(b: GraphBuilder, rows: Gemma4Rows, c: Gemma4, i: int) -> Value:
    """x + norm(proj(gelu(gate(x)) * own)): what the layer knows of the token itself."""
    blk, n = f"blk.{i}", len(c.layers)
    whole = b.weight("per_layer_model_proj.weight", n * c.own, c.width)
    p = b.op("linear", [rows.embedded], [whole.rows(i * c.own, (i + 1) * c.own)], NONE, c.own, part="own")
    # The projection is times 1 / sqrt(width), which a norm only sees in what it adds to the mean.
    p = blocks.rms_norm(b, p, "per_layer_proj_norm.weight", c.eps * c.width, "own")
    p = blocks.scaled(b, blocks.add(b, p, rows.own[i], "own"), math.sqrt(0.5), "own")
    g = blocks.linear(b, rows.x, f"{blk}.inp_gate", c.own, "own")
    g = b.op("geglu", [g, p], [], Gelu(), c.own, part="own")
    y = blocks.linear(b, g, f"{blk}.proj", c.width, "own")
    return blocks.add(b, rows.x, norm(b, y, f"{blk}.post_norm", c, "own"), "own")
