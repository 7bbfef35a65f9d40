"""llama, and what GGUF calls llama: mistral, smollm, tinyllama."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Value
from hetrun.models import blocks
from hetrun.ops import Rope

name = "llama"


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The settings of a llama model."""

    n_vocab: int
    width: int
    n_layers: int
    n_ff: int
    eps: float
    attention: blocks.AttentionShape
    rope: Rope


def read_config(meta: ModelMeta) -> LlamaConfig:
    """The settings as GGUF names them."""
    width = meta.require_int("embedding_length", 1, 1 << 20)
    n_heads = meta.require_int("attention.head_count", 1, 1 << 14)
    n_kv_heads = meta.get_int("attention.head_count_kv", n_heads, 1, n_heads)
    head_dim = meta.get_int("attention.key_length", width // n_heads, 1, 1 << 12)
    return LlamaConfig(
        n_vocab=meta.require_int("vocab_size", 1, 1 << 24),
        width=width,
        n_layers=meta.require_int("block_count", 1, 1 << 12),
        n_ff=meta.require_int("feed_forward_length", 1, 1 << 24),
        eps=meta.get_float("attention.layer_norm_rms_epsilon", 1e-5),
        attention=blocks.AttentionShape(n_heads, n_kv_heads, head_dim, 1 / math.sqrt(head_dim)),
        rope=read_rope(meta, n_heads, head_dim, interleaved=True),
    )


def read_rope(meta: ModelMeta, n_heads: int, head_dim: int, interleaved: bool) -> Rope:
    """Rope for the query heads; scaling as llama.cpp reads it."""
    kind = meta.get_str("rope.scaling.type", "none")
    factor = meta.get_float("rope.scaling.factor", 1.0)
    scaled = kind in ("linear", "yarn") and factor > 0
    return Rope(
        n_heads=n_heads,
        head_dim=head_dim,
        n_rot=meta.get_int("rope.dimension_count", head_dim, 2, head_dim),
        base=meta.get_float("rope.freq_base", 10000.0),
        interleaved=interleaved,
        freq_scale=1 / factor if scaled else 1.0,
        ext_factor=1.0 if kind == "yarn" else 0.0,
        attn_factor=meta.get_float("rope.scaling.attn_factor", 1.0),
        beta_fast=meta.get_float("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=meta.get_float("rope.scaling.yarn_beta_slow", 1.0),
        n_ctx_orig=meta.get_int(
            "rope.scaling.original_context_length", meta.require_int("context_length", 1, 1 << 31), 1, 1 << 31
        ),
    )


def check_config(b: GraphBuilder, c: LlamaConfig) -> None:
    """What no weight's shape would show, and what kernels would end the process for."""
    a, r = c.attention, c.rope
    b.check(a.n_heads % a.n_kv_heads == 0, f"{a.n_heads} heads cannot share {a.n_kv_heads} KV heads")
    b.check(r.n_rot % 2 == 0, f"rope.dimension_count is {r.n_rot}, which is odd")
    b.check(c.eps >= 0, f"attention.layer_norm_rms_epsilon is {c.eps}")
    b.check(r.base > 0, f"rope.freq_base is {r.base}")
    b.check(0 < r.freq_scale < math.inf, f"rope.scaling.factor gives a scale of {r.freq_scale}")


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    c = read_config(meta)
    check_config(b, c)
    x = blocks.embed(b, "token_embd.weight", c.n_vocab, c.width)
    for i in range(c.n_layers):
        with b.scope(f"blk.{i}.attn"):
            x = attention(b, x, c, i)
        with b.scope(f"blk.{i}.ffn"):
            h = blocks.rms_norm(b, x, f"blk.{i}.ffn_norm.weight", c.eps)
            x = blocks.add(b, x, blocks.gated_ffn(b, h, f"blk.{i}", c.n_ff), part="down")
    with b.scope("output"):
        hidden = blocks.rms_norm(b, x, "output_norm.weight", c.eps)
        head = "output" if b.has("output.weight") else "token_embd"
        logits = blocks.linear(b, hidden, head, c.n_vocab, "head", kind="head")
    return b.finish(hidden, logits)


def attention(b: GraphBuilder, x: Value, c: LlamaConfig, i: int) -> Value:
    """x + attention(norm(x)); behind the last layer's K and V only the wanted rows go on."""
    shape, kv_width = c.attention, c.attention.n_kv_heads * c.attention.head_dim
    blk, last = f"blk.{i}", i == c.n_layers - 1
    h = blocks.rms_norm(b, x, f"{blk}.attn_norm.weight", c.eps)
    k = blocks.linear(b, h, f"{blk}.attn_k", kv_width, "k")
    v = blocks.linear(b, h, f"{blk}.attn_v", kv_width, "v")
    if last:
        h, x = blocks.select(b, h), blocks.select(b, x)
    q = blocks.linear(b, h, f"{blk}.attn_q", shape.n_heads * shape.head_dim, "q")
    q = blocks.rope(b, q, c.rope, "rope_freqs.weight", "q")
    k = blocks.rope(b, k, replace(c.rope, n_heads=shape.n_kv_heads), "rope_freqs.weight", "k")
    a = blocks.attend(b, q, k, v, i, shape)
    return blocks.add(b, x, blocks.linear(b, a, f"{blk}.attn_output", x.width, "out"), part="out")
