"""Qwen 3 Next: delta nets and gated attention, with a mixture of experts in every layer."""

from __future__ import annotations

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Value
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.models import blocks
from hetrun.models.hybrid import build_hybrid, read_hybrid, read_moe, shared_mixture
from hetrun.models.hybrid_import import mixture_from_hf, text_model

name = "qwen3next"


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    c, (moe, shared) = read_hybrid(b, meta, tiled=False), read_moe(b, meta)
    n_ff = meta.get_int("feed_forward_length", 1, 1, 1 << 24)

    def feed_forward(x: Value, i: int) -> Value:
        if b.has(f"blk.{i}.ffn_gate_inp.weight"):
            return shared_mixture(b, x, f"blk.{i}", moe, shared)
        return blocks.gated_ffn(b, x, f"blk.{i}", n_ff)

    return build_hybrid(b, c, feed_forward)


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    return mixture_from_hf(text_model(hf), name, tiled=False)
