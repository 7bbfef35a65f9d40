"""Qwen 3.5, 3.6 and 3.8, the dense ones."""

from __future__ import annotations

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.models import blocks
from hetrun.models.hybrid import build_hybrid, read_hybrid
from hetrun.models.hybrid_import import SECTIONS, hybrid_from_hf, text_model

name = "qwen35"


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    c = read_hybrid(b, meta, tiled=True)
    n_ff = meta.require_int("feed_forward_length", 1, 1 << 24)
    return build_hybrid(b, c, lambda x, i: blocks.gated_ffn(b, x, f"blk.{i}", n_ff))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it, with what sees pictures or without."""
    found = hybrid_from_hf(text_model(hf), name, tiled=True)
    return found.with_settings({"rope.dimension_sections": SECTIONS})
