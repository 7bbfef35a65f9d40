"""gpt-oss: a mixture with biases everywhere, a window in every second layer, and heads that may look away."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Weight
from hetrun.graph.ops import CLAMP, CLAMP_STEEPNESS, Moe
from hetrun.graph.remade import every_second_column, every_second_row, mxfp4, turned
from hetrun.loader.hf_mapping import Config, HfModel, Imported, Setting
from hetrun.models import blocks
from hetrun.models.decoder import build_decoder, by_period, read_decoder, read_pattern
from hetrun.models.hf_import import (
    ATTENTION,
    ImportTensors,
    decoder_settings,
    head_dim_of,
    not_in_gguf,
    rope_factors,
    sliding_layers,
)
from hetrun.models.rope import KINDS, TRUNCATE, rope_from_hf, smooth_yarn, yarn_settings

name = "gpt-oss"

PERIOD = 2  # layers from one that sees all to the next, where the settings say nothing
NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
ROUNDS = (
    f"llama.cpp rounds the borders of YaRN's ramp, as {name}'s own code and hetrun do not: with long texts "
    "its answers differ a little"
)
HALVES = (("gate", 0), ("up", 1))  # rows, or columns, in turn


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=False)
    n_experts = meta.require_int("expert_count", 1, 1 << 16)
    moe = Moe(
        n_experts,
        meta.require_int("expert_used_count", 1, n_experts),
        meta.require_int("expert_feed_forward_length", 1, 1 << 24),
        normalise=True,
        activation="clamped",
        more=("router_bias", "gate_bias", "up_bias", "down_bias"),
    )
    window = meta.get_int("attention.sliding_window", 0, 0, 1 << 31)
    windows = tuple(window if slides else 0 for slides in read_pattern(meta, d.n_layers, PERIOD))
    d = replace(d, windows=windows, ffn_norm="post_attention_norm", sinks=True)
    if d.rope.ext_factor and not meta.get_bool(TRUNCATE, False):
        rope, factors = smooth_yarn(d.rope)
        d = replace(d, rope=rope, own_factors=factors, ropes=(rope,) * d.n_layers)
    return build_decoder(b, d, lambda x, i: blocks.mixture(b, x, f"blk.{i}", moe))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it: experts in MXFP4, or as floats."""
    c = hf.config
    check_hf(c)
    head_dim, n = head_dim_of(c, 64), c.require_int("num_hidden_layers", 1, 1 << 12)
    rope = rope_from_hf(c, head_dim, base=150000.0, kinds={**KINDS, "yarn": yarn_settings})
    n_experts = c.require_int("num_local_experts", 1, 1 << 16)
    slides = sliding_layers(c, n) or by_period(n, PERIOD)
    settings = decoder_settings(c, head_dim, rope) | {
        "expert_count": n_experts,
        "expert_used_count": c.require_int("num_experts_per_tok", 1, n_experts),
        "expert_feed_forward_length": c.require_int("intermediate_size", 1, 1 << 24),
        "attention.sliding_window": c.get_int("sliding_window", 128, 1, 1 << 31),
    }
    if slides != by_period(n, PERIOD):
        settings["attention.sliding_window_pattern"] = tuple(slides)
    has_biases = c.get_bool("attention_bias", True)
    try:
        weights = tensors(hf, n, n_experts, has_biases)
    except ValueError as e:
        c.refuse(f"its tensors do not fit its settings: {e}")
    only_here = not_in_gguf(
        rope_factors(rope, name),
        (not has_biases, f"llama.cpp's {name} has biases in attention"),
        (any("beta" in key for key in rope.settings), f"llama.cpp's {name} knows YaRN's usual betas only"),
        (bool(rope.layout), f"GGUF's {name} does not round the borders of YaRN's ramp"),
    )
    layout: dict[str, Setting] = {**rope.layout, **only_here}
    if settings.get("rope.scaling.type") == "yarn":
        layout["gguf.note"] = ROUNDS
    return Imported(settings, {**weights, **rope.weights}, layout)


def check_hf(c: Config) -> None:
    """What hetrun does not do."""
    for key, usual in (("swiglu_alpha", CLAMP_STEEPNESS), ("swiglu_limit", CLAMP)):
        if c.get_float(key, usual) != usual:
            c.refuse(f"{key} is {c.get_float(key, usual):g}; hetrun runs {name} with {usual:g} only")


def tensors(hf: HfModel, n_layers: int, n_experts: int, has_biases: bool) -> dict[str, Weight]:
    """All tensors by GGUF name."""
    found = ImportTensors(hf)
    found.take_ends(tied=hf.config.get_bool("tie_word_embeddings", False))
    for i in range(n_layers):
        found.take_layer(i, {**NORMS, **ATTENTION}, ATTENTION if has_biases else ())
        blk, layer = f"blk.{i}", f"{found.root}layers.{i}"
        found.take(f"{blk}.attn_sinks.weight", f"{layer}.self_attn.sinks")
        for kind in ("weight", "bias"):
            found.take(f"{blk}.ffn_gate_inp.{kind}", f"{layer}.mlp.router.{kind}")
        experts = f"{layer}.mlp.experts"
        both = found.use(f"{experts}.gate_up_proj_bias")
        for part, first in HALVES:
            found.put(f"{blk}.ffn_{part}_exps.bias", every_second_column(both, first))
        found.take(f"{blk}.ffn_down_exps.bias", f"{experts}.down_proj_bias")
        take_matrices(hf, found, blk, experts, n_experts)
    return found.finish()


def take_matrices(hf: HfModel, found: ImportTensors, blk: str, experts: str, n: int) -> None:
    """The three matrices of all experts: of MXFP4 as rows, of floats as columns."""
    gate_up, down = f"{experts}.gate_up_proj", f"{experts}.down_proj"
    if hf.has(f"{down}_blocks"):
        rows = {}
        for key, bias in ((gate_up, 2), (down, 1)):
            numbers, scales = found.use(f"{key}_blocks"), found.use(f"{key}_scales")
            width = hf.config.require_int("intermediate_size" if bias == 2 else "hidden_size", 1, 1 << 24)
            rows[key] = mxfp4(numbers, scales, n * bias * width)
        for part, first in HALVES:
            found.put(f"{blk}.ffn_{part}_exps.weight", every_second_row(rows[gate_up], first))
        found.put(f"{blk}.ffn_down_exps.weight", rows[down])
        return
    both = found.use(gate_up)
    for part, first in HALVES:
        found.put(f"{blk}.ffn_{part}_exps.weight", turned(both, n, first, step=2))
    found.put(f"{blk}.ffn_down_exps.weight", turned(found.use(down), n))
