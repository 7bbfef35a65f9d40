"""OLMo 2 and 3: norms after attention and feed-forward, and one over all heads of q or k; OLMo 3
has windows, in whose layers rope is not scaled."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.graph.ops import Rope
from hetrun.loader.hf_mapping import Config, HfModel, Imported, Setting
from hetrun.models.decoder import build_decoder, plain_ffn, read_decoder
from hetrun.models.hf_import import (
    ATTENTION,
    decoder_settings,
    decoder_weights,
    head_dim_of,
    layer_windows,
    not_in_gguf,
    rope_factors,
    sliding_layers,
    window_of,
)
from hetrun.models.rope import KINDS, HfRope, rope_from_hf, scaling_from_hf

name = "olmo2"

NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
BASE_OF_WINDOWS = "rope.freq_base_swa"
INTERVAL = 4  # layers, of which the last sees all, where OLMo 3's settings say nothing
BASE = {"olmo2": 10000.0, "olmo3": 500000.0}


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=False)
    plain = Rope(d.rope.n_heads, d.rope.head_dim, d.rope.n_rot, d.rope.base, interleaved=False)
    plain = replace(plain, base=meta.get_float(BASE_OF_WINDOWS, plain.base))
    b.check(plain.base > 0, f"{BASE_OF_WINDOWS} is {plain.base}")
    b.check(not (any(d.windows) and b.has(d.factors)), "it has factors of rope beside windows")
    ropes = tuple(plain if window else d.rope for window in d.windows)
    d = replace(d, norms="after", head_norms="all", ropes=ropes)
    return build_decoder(b, d, plain_ffn(b, d))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    kind, head_dim = c.get_str("model_type", name), head_dim_of(c)
    windows = sliding(c) if kind == "olmo3" else {}
    rope = ropes(c, head_dim, BASE[kind])
    if windows and rope.weights:
        c.refuse("its rope is scaled by factors beside windows, which is not done in models of its type")
    settings = decoder_settings(c, head_dim, rope) | windows
    if windows:
        settings[BASE_OF_WINDOWS] = base_of(c, "sliding_attention", BASE[kind])
    biased = ATTENTION if c.get_bool("attention_bias", False) else ()
    weights = decoder_weights(hf, biased, head_norms=True, norms=NORMS)
    only_here = not_in_gguf(
        rope_factors(rope, name),
        (bool(biased), f"llama.cpp's {name} has no bias after attention"),
        ("output.weight" not in weights, f"llama.cpp's {name} has an output matrix of its own"),
        (
            weights["blk.0.attn_q.weight"].shape[0] != settings["embedding_length"],
            f"llama.cpp's {name} has no head_dim of its own",
        ),
    )
    return Imported(settings, {**weights, **rope.weights}, {**rope.layout, **only_here})


def ropes(c: Config, head_dim: int, base: float) -> HfRope:
    """That of layers which see all; transformers 5 has settings for both kinds of layers."""
    both = c.section("rope_parameters")
    if not both.has("full_attention"):
        return rope_from_hf(c, head_dim, base=base)
    return scaling_from_hf(c, both.section("full_attention"), head_dim, base, False, KINDS)


def base_of(c: Config, kind: str, usual: float) -> float:
    """Rope's base in layers of a kind."""
    own = c.section("rope_parameters").section(kind)
    return own.get_float("rope_theta", c.get_float("rope_theta", usual))


def sliding(c: Config) -> dict[str, Setting]:
    """Which layers have a window: layer_types says it, else all but the last of each interval."""
    n = c.require_int("num_hidden_layers", 1, 1 << 12)
    window = window_of(c, 4096)
    return layer_windows(c, window, sliding_layers(c, n) or [(i + 1) % INTERVAL != 0 for i in range(n)])
