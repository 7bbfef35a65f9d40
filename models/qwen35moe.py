"""Qwen 3.5 and 3.6 with a mixture of experts in every layer, one of them shared by all tokens."""

from __future__ import annotations

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.models.hybrid import build_hybrid, read_hybrid, read_moe, shared_mixture
from hetrun.models.hybrid_import import SECTIONS, mixture_from_hf, text_model

name = "qwen35moe"


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    c, (moe, shared) = read_hybrid(b, meta, tiled=True), read_moe(b, meta)
    return build_hybrid(b, c, lambda x, i: shared_mixture(b, x, f"blk.{i}", moe, shared))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it, with what sees pictures or without."""
    found = mixture_from_hf(text_model(hf), name, tiled=True)
    return found.with_settings({"rope.dimension_sections": SECTIONS})
