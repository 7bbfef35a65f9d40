"""ERNIE 4.5 (dense): llama, with heads that rope rotates as they lie in its file."""

from __future__ import annotations

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.models.decoder import build_decoder, plain_ffn, read_decoder
from hetrun.models.hf_import import (
    ATTENTION,
    FEED_FORWARD,
    decoder_settings,
    decoder_weights,
    head_dim_of,
    not_in_gguf,
    rope_factors,
)
from hetrun.models.rope import rope_from_hf

name = "ernie4_5"


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=True)
    return build_decoder(b, d, plain_ffn(b, d))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config.with_defaults({"tie_word_embeddings": True})
    head_dim = head_dim_of(c, default=128)
    rope = rope_from_hf(c, head_dim, base=500000.0)
    biased = {*ATTENTION, *FEED_FORWARD} if c.get_bool("use_bias", False) else ()
    weights = decoder_weights(HfModel(c, hf.tensors), biased)
    only_here = not_in_gguf(
        rope_factors(rope, name),
        (bool(biased), f"llama.cpp's {name} has no biases"),
    )
    settings = decoder_settings(c, head_dim, rope)
    return Imported(settings, {**weights, **rope.weights}, {**rope.layout, **only_here})
