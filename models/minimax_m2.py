"""MiniMax M2: a mixture chosen by sigmoids in every layer, heads normed as one, rope on a part of a head."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.models.decoder import build_decoder, read_decoder
from hetrun.models.hf_import import (
    MixtureExtras,
    decoder_settings,
    decoder_weights,
    experts_apart,
    head_dim_of,
    not_in_gguf,
    rope_factors,
)
from hetrun.models.llama import renamed
from hetrun.models.mixtures import SIGMOID, mixed_ffn, mixture_settings, read_mixtures
from hetrun.models.rope import rope_from_hf

name = "minimax-m2"

BASE = 5000000.0  # of rope, where the settings say nothing
# As it is published, and as transformers 5 has it.
MIXTRAL = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = replace(read_decoder(b, meta, interleaved=False), head_norms="all")
    mixtures = read_mixtures(b, meta, SIGMOID, normalise=True)
    return build_decoder(b, d, mixed_ffn(b, mixtures))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    head_dim = head_dim_of(c, 128)
    if c.has("rotary_dim"):
        c = c.with_defaults({"partial_rotary_factor": c.require_int("rotary_dim", 1, head_dim) / head_dim})
    rope = rope_from_hf(c, head_dim, base=BASE, partial=True)
    n_experts = c.require_int("num_local_experts", 1, 1 << 16)
    own = c.with_defaults({"moe_intermediate_size": c.require_int("intermediate_size", 1, 1 << 24)})
    settings = decoder_settings(c, head_dim, rope)
    settings |= mixture_settings(own, "num_local_experts", SIGMOID, normalise=True)
    apart = experts_apart(renamed(HfModel(c, hf.tensors), MIXTRAL), n_experts)
    mixing = MixtureExtras("mlp.e_score_correction_bias")
    weights = decoder_weights(apart, (), n_experts, head_norms=True, mixing=mixing)
    only_here = not_in_gguf(rope_factors(rope, name))
    return Imported(settings, {**weights, **rope.weights}, {**rope.layout, **only_here})
