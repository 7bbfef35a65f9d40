"""Qwen 3: llama whose heads of q and k are normed before rope turns them."""

from __future__ import annotations

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.models.decoder import build_decoder, plain_ffn, read_decoder
from hetrun.models.hf_import import (
    ATTENTION,
    decoder_settings,
    decoder_weights,
    head_dim_of,
    not_in_gguf,
    qwen_windows,
    rope_factors,
)
from hetrun.models.rope import rope_from_hf

name = "qwen3"


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=False, head_norms=True)
    return build_decoder(b, d, plain_ffn(b, d))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    head_dim = head_dim_of(c, default=128)
    rope = rope_from_hf(c, head_dim)
    settings = decoder_settings(c, head_dim, rope) | qwen_windows(c)
    biased = ATTENTION if c.get_bool("attention_bias", False) else ()
    weights = decoder_weights(hf, biased, head_norms=True)
    only_here = not_in_gguf(
        rope_factors(rope, name),
        (bool(biased), f"llama.cpp's {name} has no bias after attention"),
    )
    return Imported(settings, {**weights, **rope.weights}, {**rope.layout, **only_here})
