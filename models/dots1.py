"""dots.llm1: a mixture chosen by sigmoids beside shared experts, and normed heads."""

from __future__ import annotations

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import Config, HfModel, Imported, Setting
from hetrun.models.decoder import build_decoder, read_decoder
from hetrun.models.glm4moe import MIXING
from hetrun.models.hf_import import (
    ATTENTION,
    decoder_settings,
    decoder_weights,
    experts_apart,
    head_dim_of,
    layer_windows,
    not_in_gguf,
    rope_factors,
    sliding_layers,
    window_of,
)
from hetrun.models.mixtures import SIGMOID, SOFTMAX, mixed_ffn, mixture_settings, read_mixtures
from hetrun.models.rope import rope_from_hf

name = "dots1"


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=False, head_norms=True)
    mixtures = read_mixtures(b, meta, SOFTMAX, normalise=False)
    return build_decoder(b, d, mixed_ffn(b, mixtures))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    head_dim = head_dim_of(c)
    rope, windows = rope_from_hf(c, head_dim), sliding(c)
    n = c.require_int("n_routed_experts", 1, 1 << 16)
    mixture = mixture_settings(c, "n_routed_experts", SIGMOID, normalise=False)
    dense = c.get_int("first_k_dense_replace", 0, 0, 1 << 12)
    settings = decoder_settings(c, head_dim, rope) | mixture | {"leading_dense_block_count": dense}
    biased = ATTENTION if c.get_bool("attention_bias", False) else ()
    weights = decoder_weights(experts_apart(hf, n), biased, n, head_norms=True, mixing=MIXING)
    heads = settings["attention.head_count"]
    only_here = not_in_gguf(
        rope_factors(rope, name),
        (mixture.get("expert_group_count", 1) != 1, f"llama.cpp's {name} knows no groups of experts"),
        ("output.weight" not in weights, f"llama.cpp's {name} has an output matrix of its own"),
        (settings["attention.head_count_kv"] != heads, f"llama.cpp's {name} has as many KV heads as heads"),
        (bool(biased), f"llama.cpp's {name} has no bias after attention"),
    )
    return Imported(settings | windows, {**weights, **rope.weights}, {**rope.layout, **only_here})


def sliding(c: Config) -> dict[str, Setting]:
    """Which layers have a window: layer_types says it, else those from max_window_layers on."""
    n = c.require_int("num_hidden_layers", 1, 1 << 12)
    window = window_of(c, 4096)
    first = c.get_int("max_window_layers", 62, 0, 1 << 31)
    usual = [window is not None and i >= first for i in range(n)]
    return layer_windows(c, window, sliding_layers(c, n) or usual)
