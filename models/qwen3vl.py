"""Qwen 3 VL (language model): Qwen 3, whose tokens may have positions in height and width."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import SEES, Config, HfModel, Imported, Setting
from hetrun.models import qwen3
from hetrun.models.decoder import build_decoder, plain_ffn, read_decoder
from hetrun.models.rope import read_sections
from hetrun.models.seeing import rope_sections, text_model

name = "qwen3vl"

BASE = 500000.0  # of rope, where the settings say nothing
SECTIONS = (24, 20, 20)
DEEPSTACK = 3  # layers to which a picture's features are added


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=False, head_norms=True)
    d = replace(d, sections=read_sections(b, meta, d.rope))
    return build_decoder(b, d, plain_ffn(b, d))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it, with what sees pictures or without."""
    text = text_model(hf)
    config = text.config.with_defaults({"rope_theta": BASE})
    found = qwen3.from_hf(HfModel(config, text.tensors))
    seen = {SEES: config.get_bool(SEES, False), **found.layout}
    return replace(found.with_settings(more_settings(hf.config)), layout=seen)


def more_settings(c: Config) -> dict[str, Setting]:
    """What these models say besides."""
    layers = c.section("vision_config").get("deepstack_visual_indexes")
    return {
        "rope.dimension_sections": rope_sections(c, SECTIONS),
        "n_deepstack_layers": len(layers) if isinstance(layers, list) else DEEPSTACK,
    }
