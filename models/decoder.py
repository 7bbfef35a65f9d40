"""What llama made common: attention and feed-forward, each behind a norm and added to the stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Value, Weight
from hetrun.graph.ops import NONE, Grow, Rope
from hetrun.models import blocks
from hetrun.models.rope import check_rope, factors, read_rope

FeedForward = Callable[[Value, int], Value]  # the normed stream and the layer's number
Attend = Callable[[Value, int], Value]  # the stream and the layer's number; the stream, and what it found


@dataclass(frozen=True, slots=True)
class Decoder:
    """The settings of such a model."""

    n_vocab: int
    width: int
    n_layers: int
    n_ff: int
    eps: float
    attention: blocks.AttentionShape
    windows: tuple[int, ...]  # how many tokens each layer sees; 0 is all
    rope: Rope  # as the settings have it; what layers do is `ropes`
    factors: str  # the tensor that divides rope's angles; it may be missing
    head_norms: Literal["", "each", "all"]  # of q and k: each head by itself, or all as one
    ropes: tuple[Rope | None, ...]  # of each layer; None: nothing turns its heads
    norms: Literal["before", "after", "both"] = "before"  # where attention and feed-forward have them
    ffn_norm: str = "ffn_norm"  # its name
    last_norm: str = "output_norm"  # that of the norm before the head
    grow: Grow | None = None  # what queries do with positions
    own_factors: Weight | None = None  # what divides the angles in place of a tensor
    sinks: bool = False  # whether heads may look away
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward add to the stream
    logit_scale: float = 1.0
    softcap: float = 0.0  # of the logits; 0 is none
    turned_first: bool = False  # whether rope turns heads before they are normed
    norm_offset: float = 0.0  # what is added to the gains of the layers' norms
    own_offset: float = 0.0  # the same, of the norms of heads and of the last one
    gate: Literal["swiglu", "geglu"] = "swiglu"  # of the usual feed-forward part
    sections: tuple[int, ...] = ()  # pairs that rope turns by time, height and width; empty: all by time
    after_eps: float | None = None  # of norms after attention and feed-forward, where it is their own
    gated: bool = False  # whether a sigmoid of the normed stream scales what attention finds
    words_normed: bool = False  # whether embeddings pass a norm without a gain


def read_decoder(b: GraphBuilder, meta: ModelMeta, interleaved: bool, head_norms: bool = False) -> Decoder:
    """The settings as GGUF names them; `head_norms`: each head of q and k is normed before it is turned."""
    n_layers = count_layers(b, meta)
    heads = read_heads(b, meta)
    rope = read_rope(meta, heads.n_heads, heads.head_dim, interleaved)
    eps = meta.get_float("attention.layer_norm_rms_epsilon", 1e-5)
    b.check(eps >= 0, f"attention.layer_norm_rms_epsilon is {eps}")
    check_rope(b, meta, rope)
    return Decoder(
        n_vocab=meta.require_int("vocab_size", 1, 1 << 24),
        width=meta.require_int("embedding_length", 1, 1 << 20),
        n_layers=n_layers,
        n_ff=meta.require_int("feed_forward_length", 1, 1 << 24),
        eps=eps,
        attention=heads,
        windows=read_windows(meta, n_layers),
        rope=rope,
        factors=factors(b, meta, rope),
        head_norms="each" if head_norms else "",
        ropes=(rope,) * n_layers,
    )


def count_layers(b: GraphBuilder, meta: ModelMeta) -> int:
    """How many layers there are; a model that has more than it says would answer without them."""
    n = meta.require_int("block_count", 1, 1 << 12)
    predicting = meta.get_int("nextn_predict_layers", 0, 0, 1 << 12)
    b.check(predicting < n, f"{predicting} of {n} layers predict tokens beyond the next, which leaves none")
    b.check(not b.has(f"blk.{n}.attn_norm.weight"), f"block_count is {n}, but there is a tensor of blk.{n}")
    return n - predicting


def read_heads(b: GraphBuilder, meta: ModelMeta) -> blocks.AttentionShape:
    """The heads of every layer, with the usual scale."""
    width = meta.require_int("embedding_length", 1, 1 << 20)
    n_heads = meta.require_int("attention.head_count", 1, 1 << 14)
    n_kv_heads = read_kv_heads(b, meta, n_heads)
    head_dim = meta.get_int("attention.key_length", width // n_heads, 1, 1 << 12)
    b.check(head_dim > 0, f"{n_heads} heads cannot share a width of {width}")
    b.check(n_heads % n_kv_heads == 0, f"{n_heads} heads cannot share {n_kv_heads} KV heads")
    return blocks.AttentionShape(n_heads, n_kv_heads, head_dim, 1 / math.sqrt(head_dim))


def read_kv_heads(b: GraphBuilder, meta: ModelMeta, n_heads: int) -> int:
    """The KV heads of each layer; those of layers without attention are 0."""
    attends = read_attending(meta)
    if all(attends):
        return meta.get_int("attention.head_count_kv", n_heads, 1, n_heads)
    found = meta.get_numbers("attention.head_count_kv", len(attends)) or ()
    each = sorted(set(found) - {0})
    said = ", ".join(f"{k:g}" for k in each[:8])
    fits = len(each) == 1 and each[0] in range(1, n_heads + 1)
    b.check(fits, f"attention.head_count_kv is {said}: no number of KV heads for {n_heads} heads")
    return int(each[0])


def read_attending(meta: ModelMeta) -> tuple[bool, ...]:
    """Which layers have attention: those that have KV heads. Where none would have any, all are meant."""
    n = meta.require_int("block_count", 1, 1 << 12)
    found = meta.get_numbers("attention.head_count_kv", n) or ()
    return tuple(k != 0 for k in found) if any(found) else (True,) * n


def read_windows(meta: ModelMeta, n_layers: int) -> tuple[int, ...]:
    """One window for all layers, or for those that the pattern names."""
    window = meta.get_int("attention.sliding_window", 0, 0, 1 << 31)
    slides = meta.get_numbers("attention.sliding_window_pattern", n_layers) or (1.0,) * n_layers
    return tuple(window if s else 0 for s in slides)


def read_pattern(meta: ModelMeta, n_layers: int, period: int) -> Sequence[bool]:
    """Which layers see a window only: a truth for each layer, or the period of those that see all."""
    found = meta.get_numbers("attention.sliding_window_pattern", n_layers)
    if found is None:
        return by_period(n_layers, period)
    one_number = len(set(found)) == 1 and found[0] > 1
    return by_period(n_layers, int(found[0])) if one_number else [slides != 0 for slides in found]


def read_softcap(b: GraphBuilder, meta: ModelMeta) -> float:
    """What logits go through; 0 is nothing."""
    softcap = meta.get_float("final_logit_softcapping", 0.0)
    b.check(0 <= softcap < math.inf, f"final_logit_softcapping is {softcap}")
    return softcap


def by_period(n_layers: int, period: int) -> list[bool]:
    """Every layer slides but each period's last."""
    return [(i + 1) % period != 0 for i in range(n_layers)]


def build_decoder(
    b: GraphBuilder, d: Decoder, feed_forward: FeedForward, attend: Attend | None = None
) -> Graph:
    """The forward step; `attend`: what it has in place of the usual attention."""
    x = blocks.embed(b, "token_embd.weight", d.n_vocab, d.width)
    with b.scope("embed"):
        if d.words_normed:
            x = blocks.plain_norm(b, x, d.eps)
        x = blocks.scaled(b, x, d.embedding_scale)
    for i in range(d.n_layers):
        x = layer(b, x, d, i, feed_forward, attend)
    with b.scope("output"):
        hidden = blocks.rms_norm(b, x, f"{d.last_norm}.weight", d.eps, offset=d.own_offset)
        logits = blocks.head(b, hidden, d.n_vocab, d.softcap, d.logit_scale)
    return b.finish(hidden, logits)


def layer(
    b: GraphBuilder, x: Value, d: Decoder, i: int, feed_forward: FeedForward, attend: Attend | None = None
) -> Value:
    """Attention and feed-forward of a layer."""
    with b.scope(f"blk.{i}.attn"):
        x = attend(x, i) if attend else attention(b, x, d, i)
    with b.scope(f"blk.{i}.ffn"):
        h = feed_forward(norm(b, x, f"blk.{i}.{d.ffn_norm}", d, "before"), i)
        h = norm(b, h, f"blk.{i}.post_ffw_norm", d, "after", "down")
        return blocks.add(b, x, blocks.scaled(b, h, d.residual_scale, "down"), part="down")


def plain_ffn(b: GraphBuilder, d: Decoder) -> FeedForward:
    """The usual feed-forward part."""
    return lambda x, i: blocks.gated_ffn(b, x, f"blk.{i}", d.n_ff, d.gate)


def norm(b: GraphBuilder, x: Value, name: str, d: Decoder, where: str, part: str = "norm") -> Value:
    """The norm of a place, or x itself where the model has none there."""
    if d.norms not in (where, "both"):
        return x
    eps = d.after_eps if where == "after" and d.after_eps is not None else d.eps
    return blocks.rms_norm(b, x, f"{name}.weight", eps, part, offset=d.norm_offset)


def attention(b: GraphBuilder, x: Value, d: Decoder, i: int) -> Value:
    """x + attention(norm(x)), or x + norm(attention(x)); behind the last layer's K and V only the wanted rows
    go on."""
    shape, blk = replace(d.attention, window=d.windows[i]), f"blk.{i}"
    h = norm(b, x, f"{blk}.attn_norm", d, "before")
    k = blocks.qkv(b, h, blk, shape, "k")
    v = blocks.qkv(b, h, blk, shape, "v")
    if i == d.n_layers - 1:
        h, x = blocks.select(b, h), blocks.select(b, x)
    q = blocks.qkv(b, h, blk, shape, "q")
    q, k = normed_and_turned(b, q, k, d, i)
    if d.grow:
        q = b.op("grow", [q], [], d.grow, q.width, part="q")
    a = blocks.attend(b, q, k, v, i, shape, f"{blk}.attn_sinks.weight" if d.sinks else "")
    if d.gated:
        gate = blocks.linear(b, h, f"{blk}.attn_gate", shape.width, "q")
        a = b.op("sigmoid_gate", [gate, a], [], NONE, shape.width, part="score")
    out = blocks.linear(b, a, f"{blk}.attn_output", x.width, "out")
    out = norm(b, out, f"{blk}.post_attention_norm", d, "after", "out")
    return blocks.add(b, x, blocks.scaled(b, out, d.residual_scale, "out"), part="out")


def normed_and_turned(b: GraphBuilder, q: Value, k: Value, d: Decoder, i: int) -> tuple[Value, Value]:
    """Queries and keys after the norms of their heads and rope, as far as the model has them."""
    if d.turned_first:
        q, k = turned(b, q, k, d, i)
    if d.head_norms:
        alone, blk = d.head_norms == "each", f"blk.{i}"
        heads, kv_heads = (d.attention.n_heads, d.attention.n_kv_heads) if alone else (1, 1)
        q = blocks.rms_norm(b, q, f"{blk}.attn_q_norm.weight", d.eps, "q", heads, d.own_offset)
        k = blocks.rms_norm(b, k, f"{blk}.attn_k_norm.weight", d.eps, "k", kv_heads, d.own_offset)
    return (q, k) if d.turned_first else turned(b, q, k, d, i)


def turned(b: GraphBuilder, q: Value, k: Value, d: Decoder, i: int) -> tuple[Value, Value]:
    """Queries and keys after rope, in layers that have it."""
    if not (rope := d.ropes[i]):
        return q, k
    factors = (d.own_factors or d.factors) if rope is d.rope else ""  # scaling is for all but windows
    keys = replace(rope, n_heads=d.attention.n_kv_heads)
    q = blocks.turn(b, q, rope, factors, d.sections, "q")
    return q, blocks.turn(b, k, keys, factors, d.sections, "k")
