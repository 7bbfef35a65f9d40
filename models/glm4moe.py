"""GLM 4.5, 4.6 and 4.7: a mixture chosen by sigmoids beside a shared expert, rope on half of a head."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta, PredictionBlock
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.models.decoder import Decoder, FeedForward, build_decoder, read_decoder
from hetrun.models.hf_import import (
    MixtureExtras,
    decoder_settings,
    decoder_weights,
    experts_apart,
    head_dim_of,
    not_in_gguf,
    predicting_last,
    rope_factors,
)
from hetrun.models.mixtures import SIGMOID, mixed_ffn, mixture_settings, read_mixtures
from hetrun.models.mtp import decoder_block
from hetrun.models.rope import rope_from_hf

name = "glm4moe"

ROTARY = 0.5  # of a head, where the settings say nothing
QKV = ("attn_q", "attn_k", "attn_v")
MIXING = MixtureExtras("mlp.gate.e_score_correction_bias", "mlp.shared_experts")


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    return build_decoder(b, *_settings(b, meta))


def predicts(b: GraphBuilder, meta: ModelMeta) -> PredictionBlock | None:
    """The block that predicts one more token."""
    return decoder_block(b, *_settings(b, meta))


def _settings(b: GraphBuilder, meta: ModelMeta) -> tuple[Decoder, FeedForward]:
    normed = b.has("blk.0.attn_q_norm.weight")
    d = read_decoder(b, meta, interleaved=False, head_norms=normed)
    mixtures = read_mixtures(b, meta, SIGMOID, normalise=True)
    return replace(d, ffn_norm="post_attention_norm"), mixed_ffn(b, mixtures)


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    hf, predicting = predicting_last(hf)
    c = hf.config
    if not c.section("rope_parameters").has("partial_rotary_factor"):
        c = c.with_defaults({"partial_rotary_factor": ROTARY})
    head_dim = head_dim_of(c)
    rope = rope_from_hf(c, head_dim, partial=True)
    n_experts = c.require_int("n_routed_experts", 1, 1 << 16)
    mixture = mixture_settings(c, "n_routed_experts", SIGMOID, normalise=True)
    dense = c.get_int("first_k_dense_replace", 1, 0, 1 << 12)
    settings = decoder_settings(c, head_dim, rope) | mixture | {"leading_dense_block_count": dense}
    settings |= predicting
    norms = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    weights = decoder_weights(
        experts_apart(HfModel(c, hf.tensors), n_experts),
        QKV if c.get_bool("attention_bias", False) else (),
        n_experts,
        head_norms=c.get_bool("use_qk_norm", False),
        norms=norms,
        mixing=MIXING,
    )
    only_here = not_in_gguf(
        rope_factors(rope, name),
        (mixture.get("expert_group_count", 1) != 1, f"llama.cpp's {name} knows no groups of experts"),
    )
    return Imported(settings, {**weights, **rope.weights}, {**rope.layout, **only_here})
