"""Qwen 2 and 2.5: llama with biases on q, k and v."""

from __future__ import annotations

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.models.decoder import build_decoder, plain_ffn, read_decoder
from hetrun.models.hf_import import (
    decoder_settings,
    decoder_weights,
    head_dim_of,
    not_in_gguf,
    qwen_windows,
    rope_factors,
)
from hetrun.models.rope import rope_from_hf

name = "qwen2"


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=False)
    return build_decoder(b, d, plain_ffn(b, d))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    head_dim = head_dim_of(c)
    rope = rope_from_hf(c, head_dim)
    settings = decoder_settings(c, head_dim, rope) | qwen_windows(c)
    weights = decoder_weights(hf, biased=("attn_q", "attn_k", "attn_v"))
    only_here = not_in_gguf(
        rope_factors(rope, name),
        (
            weights["blk.0.attn_q.weight"].shape[0] != settings["embedding_length"],
            f"llama.cpp's {name} has no head_dim of its own",
        ),
    )
    return Imported(settings, {**weights, **rope.weights}, {**rope.layout, **only_here})
