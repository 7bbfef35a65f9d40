"""Phi-3 and Phi-4: q, k and v in one matrix, gate and up in another, rope with factors for long contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Value, Weight, constant
from hetrun.hf import Config, HfModel, Imported, Setting
from hetrun.models import blocks
from hetrun.ops import NONE, Rope

name = "phi3"


@dataclass(frozen=True, slots=True)
class PhiConfig:
    """The settings of a Phi-3 model."""

    n_vocab: int
    width: int
    n_layers: int
    n_ff: int
    eps: float
    attention: blocks.AttentionShape
    rope: Rope
    n_context: int


def read_config(meta: ModelMeta) -> PhiConfig:
    """The settings as GGUF names them."""
    width = meta.require_int("embedding_length", 1, 1 << 20)
    n_heads = meta.require_int("attention.head_count", 1, 1 << 14)
    head_dim = meta.get_int("attention.key_length", width // n_heads, 1, 1 << 12)
    n_context = meta.require_int("context_length", 1, 1 << 31)
    return PhiConfig(
        n_vocab=meta.require_int("vocab_size", 1, 1 << 24),
        width=width,
        n_layers=meta.require_int("block_count", 1, 1 << 12),
        n_ff=meta.require_int("feed_forward_length", 1, 1 << 24),
        eps=meta.get_float("attention.layer_norm_rms_epsilon", 1e-5),
        attention=blocks.AttentionShape(
            n_heads=n_heads,
            n_kv_heads=meta.get_int("attention.head_count_kv", n_heads, 1, n_heads),
            head_dim=head_dim,
            scale=1 / math.sqrt(head_dim),
            # llama.cpp ignores the window; the models were trained with it.
            window=meta.get_int("attention.sliding_window", 0, 0, 1 << 31),
        ),
        rope=Rope(
            n_heads=n_heads,
            head_dim=head_dim,
            n_rot=meta.get_int("rope.dimension_count", head_dim, 2, head_dim),
            base=meta.get_float("rope.freq_base", 10000.0),
            interleaved=False,
            attn_factor=meta.get_float("rope.scaling.attn_factor", 1.0),
            n_ctx_orig=meta.get_int("rope.scaling.original_context_length", n_context, 1, 1 << 31),
        ),
        n_context=n_context,
    )


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    c = read_config(meta)
    check_config(b, c)
    factors = rope_factors(b, c)
    x = blocks.embed(b, "token_embd.weight", c.n_vocab, c.width)
    for i in range(c.n_layers):
        with b.scope(f"blk.{i}.attn"):
            x = attention(b, x, c, i, factors)
        with b.scope(f"blk.{i}.ffn"):
            h = blocks.rms_norm(b, x, f"blk.{i}.ffn_norm.weight", c.eps)
            x = blocks.add(b, x, feed_forward(b, h, c, i), part="down")
    with b.scope("output"):
        hidden = blocks.rms_norm(b, x, "output_norm.weight", c.eps)
        head = "output" if b.has("output.weight") else "token_embd"
        logits = blocks.linear(b, hidden, head, c.n_vocab, "head", kind="head")
    return b.finish(hidden, logits)


def check_config(b: GraphBuilder, c: PhiConfig) -> None:
    """What no weight's shape would show, and what kernels would end the process for."""
    a, r = c.attention, c.rope
    b.check(a.n_heads % a.n_kv_heads == 0, f"{a.n_heads} heads cannot share {a.n_kv_heads} KV heads")
    b.check(r.n_rot % 2 == 0, f"rope.dimension_count is {r.n_rot}, which is odd")
    b.check(c.eps >= 0, f"attention.layer_norm_rms_epsilon is {c.eps}")
    b.check(r.base > 0, f"rope.freq_base is {r.base}")


def rope_factors(b: GraphBuilder, c: PhiConfig) -> str:
    """LongRoPE has factors for contexts as long as the original one, and others for all that are longer.

    Keys stay in the cache as they were turned, so the choice is made once, by how long sequences may become.
    """
    long = (b.context or c.n_context) > c.rope.n_ctx_orig
    return f"rope_factors_{'long' if long else 'short'}.weight"


def attention(b: GraphBuilder, x: Value, c: PhiConfig, i: int, factors: str) -> Value:
    """x + attention(norm(x)); behind the last layer's K and V only the wanted rows go on."""
    shape, blk = c.attention, f"blk.{i}"
    h = blocks.rms_norm(b, x, f"{blk}.attn_norm.weight", c.eps)
    qkv = b.weight(f"{blk}.attn_qkv.weight", shape.width + 2 * shape.kv_width, c.width)
    k_at, v_at = shape.width, shape.width + shape.kv_width
    k = product(b, h, qkv.rows(k_at, v_at), "k")
    v = product(b, h, qkv.rows(v_at, v_at + shape.kv_width), "v")
    if i == c.n_layers - 1:
        h, x = blocks.select(b, h), blocks.select(b, x)
    q = product(b, h, qkv.rows(0, k_at), "q")
    q = blocks.rope(b, q, c.rope, factors, "q")
    k = blocks.rope(b, k, replace(c.rope, n_heads=shape.n_kv_heads), factors, "k")
    a = blocks.attend(b, q, k, v, i, shape)
    return blocks.add(b, x, blocks.linear(b, a, f"{blk}.attn_output", x.width, "out"), part="out")


def feed_forward(b: GraphBuilder, x: Value, c: PhiConfig, i: int) -> Value:
    """down(silu(gate(x)) * up(x)): the first half of GGUF's ffn_up is the gate."""
    both = b.weight(f"blk.{i}.ffn_up.weight", 2 * c.n_ff, c.width)
    gate = product(b, x, both.rows(0, c.n_ff), "gate")
    up = product(b, x, both.rows(c.n_ff, 2 * c.n_ff), "up")
    h = b.op("swiglu", [gate, up], [], NONE, c.n_ff, part="up")
    return blocks.linear(b, h, f"blk.{i}.ffn_down", c.width, "down")


def product(b: GraphBuilder, x: Value, weight: Weight, part: str) -> Value:
    """A projection by some rows of a weight."""
    return b.op("linear", [x], [weight], NONE, weight.shape[0], part=part)


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    if (activation := c.get_str("hidden_act", "silu")) != "silu":
        c.refuse(f"hidden_act is {activation!r}; hetrun runs Phi-3 with silu only")
    width = c.get_int("hidden_size", 3072, 1, 1 << 20)
    n_heads = c.get_int("num_attention_heads", 32, 1, 1 << 14)
    head_dim = c.get_int("head_dim", width // n_heads, 1, 1 << 12)
    n_layers = c.get_int("num_hidden_layers", 32, 1, 1 << 12)
    ropes, factors = rope_from_hf(c, head_dim)
    settings: dict[str, Setting] = {
        "vocab_size": c.get_int("vocab_size", 32064, 1, 1 << 24),
        "embedding_length": width,
        "block_count": n_layers,
        "feed_forward_length": c.get_int("intermediate_size", 8192, 1, 1 << 24),
        "attention.head_count": n_heads,
        "attention.head_count_kv": c.get_int("num_key_value_heads", n_heads, 1, n_heads),
        "attention.layer_norm_rms_epsilon": c.get_float("rms_norm_eps", 1e-5),
        # 0 is what tells Phi-4, which has none, in GGUF.
        "attention.sliding_window": c.get_int("sliding_window", 0, 0, 1 << 31),
        **ropes,
    }
    layout: dict[str, Setting] = {}
    if n_heads * head_dim != width:
        layout["attention.key_length"] = head_dim
        layout["gguf.inexpressible"] = "llama.cpp's phi3 has no head_dim of its own"
    weights = {gguf: hf.weight(theirs) for gguf, theirs in tensors(c, n_layers).items()}
    return Imported(settings, weights | factors, layout)


def rope_from_hf(c: Config, head_dim: int) -> tuple[dict[str, Setting], dict[str, Weight]]:
    """Rope's settings and LongRoPE's factors, as transformers 4 and 5 write them."""
    given = c.section("rope_parameters" if c.has("rope_parameters") else "rope_scaling")
    kind = given.get_str("rope_type", given.get_str("type", "default"))
    n_context = c.get_int("max_position_embeddings", 4096, 1, 1 << 31)
    original = c.get_int("original_max_position_embeddings", 4096, 2, 1 << 31)
    share = given.get_float("partial_rotary_factor", c.get_float("partial_rotary_factor", 1.0))
    n_rot = int(head_dim * share)
    settings: dict[str, Setting] = {
        "context_length": n_context,
        "rope.dimension_count": n_rot,
        "rope.freq_base": given.get_float("rope_theta", c.get_float("rope_theta", 10000.0)),
        "rope.scaling.original_context_length": original,
    }
    if kind == "default":
        return settings, {}
    # The first Phi-3 models called it su or yarn.
    if kind not in ("longrope", "su", "yarn"):
        c.refuse(f"the rope type is {kind!r}; Phi-3 has longrope only")
    factor = given.get_float("factor", n_context / original)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    settings["rope.scaling.attn_factor"] = given.get_float("attention_factor", usual)
    weights = {}
    for length in ("short", "long"):
        numbers = given.get_numbers(f"{length}_factor", n_rot // 2)
        if numbers is None or min(numbers) <= 0:
            c.refuse(f"{length}_factor must be {n_rot // 2} positive numbers")
        at = f"rope_factors_{length}.weight"
        weights[at] = constant(at, np.array(numbers, np.float32))
    return settings, weights


def tensors(c: Config, n_layers: int) -> dict[str, str]:
    """Hugging Face's name of each tensor, by GGUF's."""
    out = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not c.get_bool("tie_word_embeddings", False):
        out["output.weight"] = "lm_head.weight"
    for i in range(n_layers):
        for gguf, theirs in (
            ("attn_norm", "input_layernorm"),
            ("attn_qkv", "self_attn.qkv_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_norm", "post_attention_layernorm"),
            ("ffn_up", "mlp.gate_up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ):
            out[f"blk.{i}.{gguf}.weight"] = f"model.layers.{i}.{theirs}.weight"
    return out
