"""Ministral 3, Devstral and Mistral Small 3: llama, whose queries grow with positions beyond training."""

from __future__ import annotations

import math
from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.graph.ops import Grow, Rope
from hetrun.loader.hf_mapping import SEES, HfModel, Imported, Setting
from hetrun.models.decoder import build_decoder, plain_ffn, read_decoder
from hetrun.models.hf_import import (
    decoder_settings,
    decoder_weights,
    head_dim_of,
    interleaves,
    not_in_gguf,
)
from hetrun.models.llama import windows
from hetrun.models.rope import rope_from_hf, rope_settings
from hetrun.models.seeing import text_model

name = "mistral3"

GROWS, ORIGINAL = "attention.temperature_scale", "rope.scaling.original_context_length"
BASE = 1000000.0  # of rope, where the settings say nothing
ROPE = {  # of ministral3, in the same case
    "rope_type": "yarn", "rope_theta": BASE, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=not meta.get_bool("rope.halves", False))
    grows = meta.get_float(GROWS, 0.0)
    b.check(abs(grows) < math.inf, f"{GROWS} is {grows}")
    rope = toned_down(d.rope, meta.get_float("rope.scaling.yarn_log_multiplier", 0.0))
    d = replace(d, ropes=(rope,) * d.n_layers, grow=Grow(grows, rope.n_ctx_orig) if grows else None)
    return build_decoder(b, d, plain_ffn(b, d))


def toned_down(rope: Rope, multiplier: float) -> Rope:
    """Without what YaRN makes queries and keys larger by, as far as the multiplier says."""
    if not rope.ext_factor or rope.freq_scale >= 1:
        return rope
    larger = 1 + 0.1 * multiplier * math.log(1 / rope.freq_scale)
    return replace(rope, attn_factor=rope.attn_factor / larger)


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it, with what sees pictures or without."""
    text = text_model(hf)
    c = text.config
    if c.get_str("model_type", "") == "ministral3" and not c.has("rope_scaling"):
        c = c.with_defaults({"rope_parameters": ROPE})
    head_dim = head_dim_of(c)
    rope, slides = rope_from_hf(c, head_dim, base=BASE), windows(c)
    settings = decoder_settings(c, head_dim, rope) | slides
    scaling = rope_settings(c)
    if grows := scaling.get_float("llama_4_scaling_beta", 0.0):
        own = scaling.require_int("original_max_position_embeddings", 1, 1 << 31)
        settings |= {GROWS: grows, ORIGINAL: own}
    weights = decoder_weights(HfModel(c, text.tensors))
    only_here = not_in_gguf((bool(slides), f"llama.cpp's {name} has no windows"))
    layout: dict[str, Setting] = {SEES: c.get_bool(SEES, False), "rope.halves": True}
    layout |= {**rope.layout, **only_here}
    return Imported(settings, {**weights, **rope.weights}, layout, interleaves(c, weights))
