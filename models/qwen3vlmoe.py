"""Qwen 3 VL (language model, mixture of experts)."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Weight
from hetrun.graph.remade import turned
from hetrun.loader.hf_mapping import SEES, HfModel, Imported
from hetrun.models import qwen3moe
from hetrun.models.qwen3vl import BASE, more_settings
from hetrun.models.seeing import text_model

name = "qwen3vlmoe"


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    return qwen3moe.build(b, meta, sections=True)


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it, with what sees pictures or without."""
    text = text_model(hf)
    config = text.config.with_defaults({"rope_theta": BASE, "norm_topk_prob": True})
    found = qwen3moe.from_hf(HfModel(config, upright(HfModel(config, text.tensors))))
    seen = {SEES: config.get_bool(SEES, False), **found.layout}
    return replace(found.with_settings(more_settings(hf.config)), layout=seen)


def upright(hf: HfModel) -> dict[str, Weight]:
    """The tensors; those of experts as other models have them, where they lie on their side."""
    c, out = hf.config, {}
    n, width = qwen3moe.count_experts(c), c.require_int("hidden_size", 1, 1 << 20)
    n_ff = c.require_int("moe_intermediate_size", 1, 1 << 24)
    on_their_side = {"gate_up_proj": (n * width, 2 * n_ff), "down_proj": (n * n_ff, width)}
    for theirs in hf.tensors:
        weight = hf.weight(theirs)
        _, _, kind = theirs.rpartition(".mlp.experts.")
        out[theirs] = turned(weight, n) if on_their_side.get(kind) == weight.shape else weight
    return out
