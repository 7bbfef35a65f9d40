"""Granite: llama with factors for embeddings, for what layers add, for attention's scores and for logits."""

from __future__ import annotations

import math
from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import HfModel, Imported, Setting
from hetrun.models.decoder import Decoder, build_decoder, plain_ffn, read_decoder
from hetrun.models.hf_import import biased, decoder_settings, decoder_weights, head_dim_of, interleaves
from hetrun.models.rope import rope_from_hf

name = "granite"

# GGUF's words for Hugging Face's; 0 or nothing: as if there were none.
FACTORS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",  # logits are divided by it
}


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = with_factors(b, meta, read_decoder(b, meta, interleaved=not meta.get_bool("rope.halves", False)))
    return build_decoder(b, d, plain_ffn(b, d))


def with_factors(b: GraphBuilder, meta: ModelMeta, d: Decoder) -> Decoder:
    """Such a decoder, as a file's settings have it."""
    found = {key: meta.get_float(key, 0.0) for key in FACTORS}
    for key, factor in found.items():
        b.check(0 <= factor < math.inf, f"{key} is {factor}")
    scale = found["attention.scale"] or d.attention.scale
    return replace(
        d,
        attention=replace(d.attention, scale=scale),
        embedding_scale=found["embedding_scale"] or 1.0,
        residual_scale=found["residual_scale"] or 1.0,
        logit_scale=1 / (found["logit_scale"] or 1.0),
    )


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    head_dim = head_dim_of(c)
    rope = rope_from_hf(c, head_dim)
    factors: dict[str, Setting] = {ours: c.get_float(theirs, 1.0) for ours, theirs in FACTORS.items()}
    plain = c
    for theirs in FACTORS.values():
        plain = plain.without(theirs)
    settings = decoder_settings(plain, head_dim, rope) | factors
    weights = decoder_weights(hf, biased(c))
    layout: dict[str, Setting] = {"rope.halves": True, **rope.layout}
    return Imported(settings, {**weights, **rope.weights}, layout, interleaves(c, weights))
