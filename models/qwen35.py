"""Qwen 3.5, 3.6 and 3.8 (dense)."""

from __future__ import annotations

from hetrun.graph import Graph, GraphBuilder, ModelMeta, PredictionBlock
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.models import blocks
from hetrun.models.hybrid import FeedForward, build_hybrid, read_hybrid
from hetrun.models.hybrid_import import SECTIONS, hybrid_from_hf, hybrid_model
from hetrun.models.mtp import hybrid_block
from hetrun.models.seeing import rope_sections

name = "qwen35"


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    return build_hybrid(b, read_hybrid(b, meta, tiled=True), _feed_forward(b, meta))


def predicts(b: GraphBuilder, meta: ModelMeta) -> PredictionBlock | None:
    """The block that predicts one more token."""
    return hybrid_block(b, read_hybrid(b, meta, tiled=True), _feed_forward(b, meta))


def _feed_forward(b: GraphBuilder, meta: ModelMeta) -> FeedForward:
    n_ff = meta.require_int("feed_forward_length", 1, 1 << 24)
    return lambda x, i: blocks.gated_ffn(b, x, f"blk.{i}", n_ff)


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it, with what sees pictures or without."""
    found = hybrid_from_hf(hybrid_model(hf), name, tiled=True)
    return found.with_settings({"rope.dimension_sections": rope_sections(hf.config, SECTIONS)})
