"""Granite (mixture of experts), with or without a shared expert."""

from __future__ import annotations

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Weight
from hetrun.loader.hf_mapping import HfModel, Imported, Setting
from hetrun.models.decoder import build_decoder, read_decoder
from hetrun.models.granite import FACTORS, with_factors
from hetrun.models.hf_import import (
    ATTENTION,
    MixtureExtras,
    decoder_settings,
    decoder_weights,
    experts_apart,
    head_dim_of,
    interleaves,
)
from hetrun.models.mixtures import SOFTMAX, mixed_ffn, read_mixtures
from hetrun.models.rope import rope_from_hf

name = "granitemoe"

# As folders are published, and as transformers 5 holds them.
OTHER_WORDS = {
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "mlp.gate.weight",
    "block_sparse_moe.experts.gate_up_proj": "mlp.experts.gate_up_proj",
    "block_sparse_moe.experts.down_proj": "mlp.experts.down_proj",
    "block_sparse_moe.router.weight": "mlp.gate.weight",
    "shared_mlp.output_linear.weight": "shared_mlp.down_proj.weight",
}
SHARED = "shared_mlp.input_linear.weight"


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = with_factors(b, meta, read_decoder(b, meta, interleaved=not meta.get_bool("rope.halves", False)))
    mixtures = read_mixtures(b, meta, SOFTMAX, normalise=True)
    return build_decoder(b, d, mixed_ffn(b, mixtures))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    head_dim = head_dim_of(c)
    rope = rope_from_hf(c, head_dim)
    n = c.require_int("num_local_experts", 1, 1 << 16)
    mixture: dict[str, Setting] = {
        "expert_count": n,
        "expert_used_count": c.require_int("num_experts_per_tok", 1, n),
        **{ours: c.get_float(theirs, 1.0) for ours, theirs in FACTORS.items()},
    }
    if shared := c.get_int("shared_intermediate_size", 0, 0, 1 << 24):
        mixture["expert_shared_feed_forward_length"] = shared
    plain = c
    for theirs in FACTORS.values():
        plain = plain.without(theirs)
    settings = decoder_settings(plain, head_dim, rope) | mixture
    biased = ATTENTION if c.get_bool("attention_bias", False) else ()
    apart = experts_apart(HfModel(c, usual_words(hf, shared)), n)
    weights = decoder_weights(apart, biased, n, mixing=MixtureExtras("", "shared_mlp" if shared else ""))
    layout: dict[str, Setting] = {"rope.halves": True, **rope.layout}
    return Imported(settings, {**weights, **rope.weights}, layout, interleaves(c, weights))


def usual_words(hf: HfModel, shared: int) -> dict[str, Weight]:
    """The tensors as other mixtures have them: gate and up of the shared expert apart."""
    out: dict[str, Weight] = {}
    for theirs, weight in hf.tensors.items():
        if shared and theirs.endswith(SHARED) and weight.shape[0] == 2 * shared:
            for part, a in (("gate", 0), ("up", shared)):
                out[theirs.replace("input_linear", f"{part}_proj")] = weight.rows(a, a + shared)
            continue
        ending = next((words for words in OTHER_WORDS if theirs.endswith(words)), "")
        out[theirs.removesuffix(ending) + OTHER_WORDS.get(ending, "")] = weight
    return out
