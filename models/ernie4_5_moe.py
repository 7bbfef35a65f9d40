"""ERNIE 4.5 (mixture of experts): a bias chooses experts and does not count in the result; shared experts."""

from __future__ import annotations

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
from hetrun.models.mixtures import SOFTMAX, mixed_ffn, mixture_settings, read_mixtures
from hetrun.models.rope import rope_from_hf

name = "ernie4_5-moe"

# As transformers names them, and as it is published.
WORDS = {
    "n_routed_experts": ("moe_num_experts", "num_experts"),
    "num_experts_per_tok": ("moe_k",),
    "n_shared_experts": ("moe_num_shared_experts",),
}
MIXING = MixtureExtras("mlp.moe_statics.e_score_correction_bias", "mlp.shared_experts")


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=True)
    mixtures = read_mixtures(b, meta, SOFTMAX, normalise=True)
    return build_decoder(b, d, mixed_ffn(b, mixtures))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config.with_defaults({"tie_word_embeddings": True})
    said = {key: c.get(name) for key, names in WORDS.items() for name in names if c.has(name)}
    c = c.with_defaults(said)
    if c.get_bool("use_bias", False):
        c.refuse("use_bias is true, and biases are not done in models of its type")
    head_dim = head_dim_of(c)
    rope = rope_from_hf(c, head_dim, base=500000.0)
    n = c.require_int("num_hidden_layers", 1, 1 << 12)
    n_experts = c.require_int("n_routed_experts", 1, 1 << 16)
    last = c.get_int("moe_layer_end_index", -1, -1, 1 << 12)
    settings = decoder_settings(c, head_dim, rope)
    settings |= mixture_settings(c, "n_routed_experts", SOFTMAX, normalise=True)
    settings |= {
        "leading_dense_block_count": c.get_int("moe_layer_start_index", 1, 0, 1 << 12),
        "interleave_moe_layer_step": c.get_int("moe_layer_interval", 1, 1, 1 << 12),
    }
    shared = c.get_int("n_shared_experts", 0, 0, 1 << 10) * c.require_int("moe_intermediate_size", 1, 1 << 24)
    settings["expert_shared_feed_forward_length"] = shared
    weights = decoder_weights(experts_apart(HfModel(c, hf.tensors), n_experts), (), n_experts, mixing=MIXING)
    only_here = not_in_gguf(
        rope_factors(rope, name),
        (settings["interleave_moe_layer_step"] != 1, f"llama.cpp's {name} has no dense layers between"),
        (last not in (-1, n - 1), f"llama.cpp's {name} has mixtures up to its last layer"),
    )
    return Imported(settings, {**weights, **rope.weights}, {**rope.layout, **only_here})
