"""Qwen 3.5 and 3.6 (mixture of experts): in every layer, one of them shared by all tokens."""

from __future__ import annotations

from hetrun.graph import Graph, GraphBuilder, ModelMeta, PredictionBlock
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.models.hybrid import FeedForward, build_hybrid, read_hybrid, read_moe, shared_mixture
from hetrun.models.hybrid_import import SECTIONS, hybrid_model, mixture_from_hf
from hetrun.models.mtp import hybrid_block
from hetrun.models.seeing import rope_sections

name = "qwen35moe"


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    return build_hybrid(b, read_hybrid(b, meta, tiled=True), _feed_forward(b, meta))


def predicts(b: GraphBuilder, meta: ModelMeta) -> PredictionBlock | None:
    """The block that predicts one more token."""
    return hybrid_block(b, read_hybrid(b, meta, tiled=True), _feed_forward(b, meta))


def _feed_forward(b: GraphBuilder, meta: ModelMeta) -> FeedForward:
    moe, shared = read_moe(b, meta)
    return lambda x, i: shared_mixture(b, x, f"blk.{i}", moe, shared)


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it, with what sees pictures or without."""
    found = mixture_from_hf(hybrid_model(hf), name, tiled=True)
    return found.with_settings({"rope.dimension_sections": rope_sections(hf.config, SECTIONS)})
