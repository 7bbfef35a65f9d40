"""Seed-OSS: llama with biases on q, k and v, and another name of the norm before the feed-forward."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.models.decoder import build_decoder, plain_ffn, read_decoder
from hetrun.models.hf_import import (
    FEED_FORWARD,
    decoder_settings,
    decoder_weights,
    head_dim_of,
    not_in_gguf,
    rope_factors,
)
from hetrun.models.rope import rope_from_hf

name = "seed_oss"

NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = replace(read_decoder(b, meta, interleaved=False), ffn_norm="post_attention_norm")
    return build_decoder(b, d, plain_ffn(b, d))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    head_dim = head_dim_of(c, default=128)
    rope = rope_from_hf(c, head_dim)
    inner, out = c.get_bool("attention_bias", True), c.get_bool("attention_out_bias", False)
    forward = c.get_bool("mlp_bias", False)
    biased = {
        *(("attn_q", "attn_k", "attn_v") if inner else ()),
        *(("attn_output",) if out else ()),
        *(FEED_FORWARD if forward else ()),
    }
    weights = decoder_weights(hf, biased, norms=NORMS)
    only_here = not_in_gguf(
        rope_factors(rope, name),
        (not inner, f"llama.cpp's {name} needs a bias on q, k and v"),
        (out or forward, f"llama.cpp's {name} has a bias on q, k and v only"),
    )
    settings = decoder_settings(c, head_dim, rope)
    return Imported(settings, {**weights, **rope.weights}, {**rope.layout, **only_here})
