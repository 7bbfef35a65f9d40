"""Qwen 3 Next: delta nets and gated attention, with a mixture of experts in every layer."""

from __future__ import annotations

from hetrun.graph import Graph, GraphBuilder, ModelMeta, PredictionBlock, Value
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.models import blocks
from hetrun.models.hybrid import FeedForward, build_hybrid, read_hybrid, read_moe, shared_mixture
from hetrun.models.hybrid_import import hybrid_model, mixture_from_hf
from hetrun.models.mtp import hybrid_block

name = "qwen3next"


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    return build_hybrid(b, read_hybrid(b, meta, tiled=False), _feed_forward(b, meta))


def predicts(b: GraphBuilder, meta: ModelMeta) -> PredictionBlock | None:
    """The block that predicts one more token."""
    return hybrid_block(b, read_hybrid(b, meta, tiled=False), _feed_forward(b, meta))


def _feed_forward(b: GraphBuilder, meta: ModelMeta) -> FeedForward:
    moe, shared = read_moe(b, meta)
    n_ff = meta.get_int("feed_forward_length", 1, 1, 1 << 24)

    def feed_forward(x: Value, i: int) -> Value:
        if b.has(f"blk.{i}.ffn_gate_inp.weight"):
            return shared_mixture(b, x, f"blk.{i}", moe, shared)
        return blocks.gated_ffn(b, x, f"blk.{i}", n_ff)

    return feed_forward


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    return mixture_from_hf(hybrid_model(hf), name, tiled=False)
