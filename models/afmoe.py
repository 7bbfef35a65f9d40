"""AFMoE (Trinity): gated attention, rope in layers with a window only, and a mixture chosen by sigmoids."""

from __future__ import annotations

import math
from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Weight
from hetrun.loader.hf_mapping import Config, HfModel, Imported, Setting
from hetrun.models.decoder import build_decoder, by_period, read_decoder, read_pattern
from hetrun.models.hf_import import (
    ATTENTION,
    FEED_FORWARD,
    HEAD_NORMS,
    ImportTensors,
    MixtureExtras,
    decoder_settings,
    experts_apart,
    head_dim_of,
    layer_windows,
    not_in_gguf,
    sliding_layers,
    window_of,
)
from hetrun.models.mixtures import SIGMOID, mixed_ffn, mixture_settings, read_mixtures
from hetrun.models.rope import rope_from_hf

name = "afmoe"

PERIOD = 4  # layers from one that sees all to the next, where the settings say nothing
HEAD_DIM = 128  # in the same case
SCALE = "embedding_scale"  # a setting of ours: llama.cpp knows the square root of the width only
LAYERS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "attn_gate": "self_attn.gate_proj",
}
MIXING = MixtureExtras("mlp.expert_bias", "mlp.shared_experts")


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=False, head_norms=True)
    slides = read_pattern(meta, d.n_layers, PERIOD)
    window = meta.get_int("attention.sliding_window", 0, 0, 1 << 31)
    scale = meta.get_float(SCALE, math.sqrt(d.width))
    b.check(abs(scale) < math.inf, f"{SCALE} is {scale}")
    d = replace(
        d,
        windows=tuple(window if s else 0 for s in slides),
        ropes=tuple(d.rope if s else None for s in slides),
        norms="both",
        gated=True,
        embedding_scale=scale,
    )
    mixtures = read_mixtures(b, meta, SIGMOID, normalise=False)
    return build_decoder(b, d, mixed_ffn(b, mixtures))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    head_dim, n = head_dim_of(c, HEAD_DIM), c.require_int("num_hidden_layers", 1, 1 << 12)
    rope = rope_from_hf(c, head_dim)
    mixture = mixture_settings(c, "num_experts", SIGMOID, normalise=True)
    mixture |= {
        "expert_weights_norm": True,
        "expert_weights_scale": c.get_float("route_scale", 1.0),
        "expert_shared_count": c.get_int("num_shared_experts", 2, 0, 1 << 10),
        "leading_dense_block_count": c.get_int("num_dense_layers", 1, 0, 1 << 12),
    }
    check_routing(c)
    usual = by_period(n, PERIOD)
    slides = sliding_layers(c, n) or by_period(n, c.get_int("global_attn_every_n_layers", PERIOD, 1, 1 << 12))
    settings = decoder_settings(c, head_dim, rope) | mixture
    settings |= layer_windows(c, window_of(c, 1024), slides)
    settings["attention.sliding_window_pattern"] = tuple(slides)
    weights = tensors(hf, n)
    scaled = c.get_bool("mup_enabled", False)
    only_here = not_in_gguf(
        (slides != usual, f"llama.cpp's {name} has windows and rope in all but every fourth layer"),
        (not any(slides), f"llama.cpp's {name} has no rope without windows"),
        (not scaled, f"llama.cpp's {name} multiplies embeddings by the square root of their width"),
        (bool(rope.weights), f"llama.cpp's {name} knows no factors of rope"),
        ("blk.0.attn_output.bias" in weights, f"llama.cpp's {name} has no bias after attention"),
    )
    layout: dict[str, Setting] = {**rope.layout, **only_here}
    if not scaled:
        layout[SCALE] = 1.0
    return Imported(settings, {**weights, **rope.weights}, layout)


def check_routing(c: Config) -> None:
    """What configs may say of the router that transformers does not heed."""
    if (scores := c.get_str("score_func", "sigmoid")) != "sigmoid":
        c.refuse(f"score_func is {scores[:40]!r}; hetrun runs models of its type with sigmoid only")
    if not c.get_bool("route_norm", True):
        c.refuse("route_norm is false, which hetrun does not do for models of its type")


def tensors(hf: HfModel, n: int) -> dict[str, Weight]:
    """All tensors by GGUF name."""
    c = hf.config
    n_experts = c.require_int("num_experts", 1, 1 << 16)
    renamed = {theirs.replace(".mlp.router.gate.", ".mlp.gate."): w for theirs, w in hf.tensors.items()}
    hf = experts_apart(HfModel(c, renamed), n_experts)
    found = ImportTensors(hf)
    found.take_ends(tied=c.get_bool("tie_word_embeddings", False))
    biased = ATTENTION if c.get_bool("attention_bias", False) else ()
    for i in range(n):
        found.take_layer(i, {**LAYERS, **ATTENTION, **HEAD_NORMS}, biased)
        if i < c.get_int("num_dense_layers", 1, 0, 1 << 12):
            found.take_layer(i, FEED_FORWARD, ())
        else:
            found.take_experts(i, n_experts)
            found.take_mixing(i, MIXING)
    return found.finish()
