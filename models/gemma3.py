"""Gemma 3: layers that see a window, every sixth one that sees all, and norms around everything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Weight
from hetrun.graph.ops import Rope
from hetrun.loader.hf_mapping import SEES, AddOne, Config, HfModel, Imported, Setting
from hetrun.models.decoder import (
    Decoder,
    build_decoder,
    by_period,
    plain_ffn,
    read_decoder,
    read_pattern,
    read_softcap,
)
from hetrun.models.hf_import import (
    ATTENTION,
    FEED_FORWARD,
    HEAD_NORMS,
    ImportTensors,
    not_in_gguf,
    refuse_embedders,
    sliding_layers,
)
from hetrun.models.rope import KINDS, HfRope, scaling_from_hf
from hetrun.models.seeing import text_model

name = "gemma3"

CONTEXT = 131072  # where the settings say nothing
PERIOD = 6  # layers from one that sees all to the next, where the settings say nothing
ACTIVATION = "gelu_pytorch_tanh"
SOME_27B = 62  # layers of the model that llama.cpp knows to scale its queries otherwise
NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=False, head_norms=True)
    heads, offset = d.attention, meta.get_float("norm.offset", 0.0)
    usual = query_scale(d.n_layers, d.width, heads.n_heads, heads.head_dim)
    windows, ropes = read_windows(b, meta, d)
    d = replace(
        d,
        attention=replace(heads, scale=meta.get_float("attention.scale", usual)),
        windows=windows,
        ropes=ropes,
        norms="both",
        norm_offset=offset,
        own_offset=offset,
        embedding_scale=math.sqrt(d.width),
        softcap=read_softcap(b, meta),
        gate="geglu",
    )
    return build_decoder(b, d, plain_ffn(b, d))


def read_windows(b: GraphBuilder, meta: ModelMeta, d: Decoder) -> tuple[tuple[int, ...], tuple[Rope, ...]]:
    """What each layer sees, and its rope: of those with a window it is another, and never scaled."""
    window = meta.get_int("attention.sliding_window", 0, 0, 1 << 31)
    base = meta.get_float("rope.freq_base_swa", 10000.0)
    b.check(base > 0, f"rope.freq_base_swa is {base}")
    near = Rope(d.attention.n_heads, d.attention.head_dim, d.rope.n_rot, base, interleaved=False)
    slides = [slide and window > 0 for slide in read_pattern(meta, d.n_layers, PERIOD)]
    return tuple(window * slide for slide in slides), tuple(near if slide else d.rope for slide in slides)


def query_scale(n_layers: int, width: int, n_heads: int, head_dim: int) -> float:
    """GGUF has no word for it: llama.cpp tells the 27B model, which is another, by its number of layers."""
    return 1 / math.sqrt(max(1, width // n_heads) if n_layers == SOME_27B else head_dim)


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it, with what sees pictures or without."""
    hf = text_model(hf, tied=True)
    c = hf.config.with_defaults({"max_position_embeddings": CONTEXT})
    check_hf(c)
    n_layers = c.get_int("num_hidden_layers", 26, 1, 1 << 12)
    width = c.get_int("hidden_size", 2304, 1, 1 << 20)
    n_heads = c.get_int("num_attention_heads", 8, 1, 1 << 14)
    head_dim = c.get_int("head_dim", 256, 1, 1 << 12)
    rope, near = ropes(c, head_dim, {})
    settings: dict[str, Setting] = {
        "vocab_size": c.get_int("vocab_size", 262208, 1, 1 << 24),
        "context_length": c.require_int("max_position_embeddings", 1, 1 << 31),
        "embedding_length": width,
        "block_count": n_layers,
        "feed_forward_length": c.get_int("intermediate_size", 9216, 1, 1 << 24),
        "attention.head_count": n_heads,
        "attention.head_count_kv": c.get_int("num_key_value_heads", 4, 1, n_heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": c.get_float("rms_norm_eps", 1e-6),
        **window_settings(c, n_layers),
        **rope.settings,
        "rope.freq_base_swa": near,
    }
    if c.has("final_logit_softcapping"):
        settings["final_logit_softcapping"] = c.get_float("final_logit_softcapping", 0.0)
    weights = {**tensors(hf, n_layers), **rope.weights}
    scale = 1 / math.sqrt(c.get_float("query_pre_attn_scalar", 256.0))
    usual = math.isclose(scale, query_scale(n_layers, width, n_heads, head_dim), rel_tol=1e-6)
    plain_rope = not rope.weights and settings.get("rope.scaling.attn_factor", 1.0) == 1.0
    only_here = not_in_gguf(
        (not usual, "llama.cpp's gemma3 scales queries by head_dim, and this model does not"),
        (c.get_bool("attention_bias", False), "llama.cpp's gemma3 has no biases in attention"),
        (not plain_rope, "llama.cpp's gemma3 knows linear and plain YaRN scaling of rope only"),
    )
    layout = {"norm.offset": 1.0, "attention.scale": scale, **rope.layout, **only_here}
    layout[SEES] = c.get_bool(SEES, False)
    return Imported(settings, weights, layout, {w: AddOne() for w in weights if w.endswith("norm.weight")})


def check_hf(c: Config) -> None:
    """What hetrun does not do. attn_logit_softcapping is not here: in Gemma 3 transformers ignores it too."""
    refuse_embedders(c)
    check_activation(c)
    if c.get_float("query_pre_attn_scalar", 256.0) <= 0:
        c.refuse("query_pre_attn_scalar must be positive")


def check_activation(c: Config) -> None:
    """All Gemmas have the same."""
    if (found := c.get_str("hidden_activation", ACTIVATION)) != ACTIVATION:
        c.refuse(f"hidden_activation is {found[:40]!r}; hetrun runs Gemma 3 and 4 with {ACTIVATION} only")


def window_settings(c: Config, n_layers: int) -> dict[str, Setting]:
    """Which layers see a window only, and how much it holds."""
    usual = by_period(n_layers, c.get_int("sliding_window_pattern", PERIOD, 1, 1 << 16))
    slides = sliding_layers(c, n_layers) or usual
    if not any(slides):
        return {}
    if c.is_null("sliding_window"):
        c.refuse("layer_types has sliding_attention, but there is no sliding_window")
    out: dict[str, Setting] = {"attention.sliding_window": c.get_int("sliding_window", 4096, 1, 1 << 31)}
    if slides != by_period(n_layers, PERIOD):
        out["attention.sliding_window_pattern"] = tuple(slides)
    return out


def ropes(c: Config, head_dim: int, usual: Mapping[str, object]) -> tuple[HfRope, float]:
    """Rope of layers that see all, and the base of those with a window, as transformers 4 or 5 writes it;
    `usual`: where the settings do not say how those that see all are turned."""
    both = c.section("rope_parameters")
    full, local = both.section("full_attention"), both.section("sliding_attention")
    if c.has("rope_scaling"):
        full = c.section("rope_scaling")
    elif c.has("rope_parameters") and not (both.has("full_attention") or both.has("sliding_attention")):
        c.refuse("rope_parameters must have full_attention and sliding_attention in models of its type")
    if not both.has("full_attention"):
        full = full.with_defaults(usual)
    if (kind := local.get_str("rope_type", "default")) != "default":
        c.refuse(f"rope_parameters scales sliding_attention by {kind[:40]!r}, which hetrun does not do")
    rope = scaling_from_hf(c, full, head_dim, 1000000.0, False, KINDS)
    return rope, local.get_float("rope_theta", c.get_float("rope_local_base_freq", 10000.0))


def tensors(hf: HfModel, n_layers: int) -> dict[str, Weight]:
    """All tensors by GGUF name."""
    found = ImportTensors(hf)
    found.take_ends(tied=hf.config.get_bool("tie_word_embeddings", True))
    biased = ATTENTION if hf.config.get_bool("attention_bias", False) else ()
    for i in range(n_layers):
        found.take_layer(i, {**NORMS, **ATTENTION, **HEAD_NORMS, **FEED_FORWARD}, biased)
    return found.finish()
