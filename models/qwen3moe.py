"""Qwen 3 (mixture of experts): in all layers or in most of them."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Value
from hetrun.graph.ops import Moe
from hetrun.loader.hf_mapping import Config, HfModel, Imported
from hetrun.models import blocks
from hetrun.models.decoder import build_decoder, read_decoder
from hetrun.models.hf_import import (
    ATTENTION,
    decoder_settings,
    decoder_weights,
    experts_apart,
    head_dim_of,
    layer_windows,
    not_in_gguf,
    qwen_window,
    rope_factors,
)
from hetrun.models.rope import read_sections, rope_from_hf

name = "qwen3moe"


def build(b: GraphBuilder, meta: ModelMeta, sections: bool = False) -> Graph:
    """The forward step; `sections`: tokens may have positions in height and width."""
    d = read_decoder(b, meta, interleaved=False, head_norms=True)
    if sections:
        d = replace(d, sections=read_sections(b, meta, d.rope))
    n_experts = meta.require_int("expert_count", 1, 1 << 16)
    n_used = meta.require_int("expert_used_count", 1, n_experts)
    n_ff = meta.get_int("expert_feed_forward_length", max(1, d.n_ff // n_used), 1, 1 << 24)
    # llama.cpp always normalises, and its converter does not write the key.
    moe = Moe(n_experts, n_used, n_ff, normalise=meta.get_bool("expert_weights_norm", True))

    def feed_forward(x: Value, i: int) -> Value:
        if b.has(f"blk.{i}.ffn_gate_inp.weight"):
            return blocks.mixture(b, x, f"blk.{i}", moe)
        return blocks.gated_ffn(b, x, f"blk.{i}", d.n_ff)

    return build_decoder(b, d, feed_forward)


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    head_dim = head_dim_of(c)
    rope = rope_from_hf(c, head_dim)
    n_experts = count_experts(c)
    window = qwen_window(c)
    settings = decoder_settings(c, head_dim, rope) | layer_windows(c, window, [window is not None])
    settings |= {
        "expert_count": n_experts,
        "expert_used_count": c.require_int("num_experts_per_tok", 1, n_experts),
        "expert_feed_forward_length": c.require_int("moe_intermediate_size", 1, 1 << 24),
        "expert_weights_norm": c.get_bool("norm_topk_prob", False),
    }
    biased = ATTENTION if c.get_bool("attention_bias", False) else ()
    weights = decoder_weights(experts_apart(hf, n_experts), biased, n_experts, head_norms=True)
    dense = any(".ffn_gate.weight" in w for w in weights)
    only_here = not_in_gguf(
        rope_factors(rope, name),
        (bool(biased), f"llama.cpp's {name} has no bias after attention"),
        (dense, f"llama.cpp's {name} has no layers without experts"),
        (not settings["expert_weights_norm"], f"llama.cpp's {name} always normalises what the router says"),
    )
    return Imported(settings, {**weights, **rope.weights}, {**rope.layout, **only_here})


def count_experts(c: Config) -> int:
    """As transformers 4 or 5 calls it."""
    return c.require_int("num_experts" if c.has("num_experts") else "num_local_experts", 1, 1 << 16)
