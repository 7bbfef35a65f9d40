"""Muse Glimmer: norms around everything, gated attention, and rope in layers with a window only."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Weight, constant
from hetrun.loader.hf_mapping import SEES, AddOne, Change, Config, HfModel, Imported, Setting
from hetrun.models.decoder import (
    build_decoder,
    by_period,
    plain_ffn,
    read_decoder,
    read_pattern,
    read_softcap,
)
from hetrun.models.gemma3 import NORMS
from hetrun.models.hf_import import (
    ATTENTION,
    FEED_FORWARD,
    ImportTensors,
    decoder_settings,
    head_dim_of,
    interleaves,
    layer_windows,
    not_in_gguf,
    sliding_layers,
    window_of,
)
from hetrun.models.rope import rope_from_hf
from hetrun.models.seeing import text_model

name = "muse-glimmer"

PERIOD = 4  # layers from one that sees all to the next, where the settings say nothing
AFTER_EPS = 1e-8  # of norms after attention and feed-forward; llama.cpp knows no other
HEAD_DIM = 128  # where the settings say nothing
TURNS, EPS = "rope.layers", "norm.after_epsilon"  # settings of ours


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=not meta.get_bool("rope.halves", False), head_norms=True)
    window = meta.get_int("attention.sliding_window", 0, 0, 1 << 31)
    slides = read_pattern(meta, d.n_layers, PERIOD)
    turns = meta.get_numbers(TURNS, d.n_layers) or slides
    scale = meta.get_float("logit_scale", 1.0)
    eps = meta.get_float(EPS, AFTER_EPS)
    b.check(abs(scale) < math.inf, f"logit_scale is {scale}")
    b.check(eps >= 0, f"{EPS} is {eps}")
    d = replace(
        d,
        windows=tuple(window if s else 0 for s in slides),
        ropes=tuple(d.rope if turned else None for turned in turns),
        norms="both",
        norm_offset=meta.get_float("norm.offset", 0.0),
        after_eps=eps,
        gated=True,
        words_normed=True,
        logit_scale=scale,
        softcap=read_softcap(b, meta),
    )
    return build_decoder(b, d, plain_ffn(b, d))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it, with what sees pictures or without."""
    text = text_model(hf)
    c = text.config
    if (activation := c.get_str("hidden_activation", "silu")) != "silu":
        c.refuse(f"hidden_activation is {activation[:40]!r}; hetrun runs Muse Glimmer with silu only")
    head_dim, n = head_dim_of(c, HEAD_DIM), c.require_int("num_hidden_layers", 1, 1 << 12)
    rope = rope_from_hf(c, head_dim)
    # Counted from the last layer, which sees all.
    usual = by_period(n + -n % PERIOD, PERIOD)[-n:]
    slides = sliding_layers(c, n) or usual
    turns = turned(c, rope.settings["rope.freq_base"], n) or usual
    settings = decoder_settings(c.without("final_logit_softcapping"), head_dim, rope) | {
        "final_logit_softcapping": c.get_float("final_logit_softcapping", 20.0),
        "logit_scale": c.get_float("output_multiplier", 0.19611613513818404),
        **layer_windows(c, window_of(c, 2048), slides),
        "attention.sliding_window_pattern": tuple(slides),
    }
    eps = c.get_float("post_norm_eps", AFTER_EPS)
    weights = tensors(text, n, head_dim)
    only_here = not_in_gguf(
        (turns != slides, f"llama.cpp's {name} turns by rope what has a window, and nothing else"),
        (not any(slides), f"llama.cpp's {name} has windows"),
        (eps != AFTER_EPS, f"llama.cpp's {name} has an epsilon of {AFTER_EPS:g} in norms after attention"),
        ("rope.scaling.type" in settings or bool(rope.weights), f"llama.cpp's {name} does not scale rope"),
        ("output.weight" not in weights, f"llama.cpp's {name} has an output matrix of its own"),
        ("blk.0.attn_output.bias" in weights, f"llama.cpp's {name} has no bias after attention"),
    )
    layout: dict[str, Setting] = {"rope.halves": True, "norm.offset": 1.0, TURNS: tuple(turns), EPS: eps}
    layout |= {SEES: c.get_bool(SEES, False), **rope.layout, **only_here}
    changes: dict[str, Change] = {w: AddOne() for w in weights if w.split(".")[-2] in NORMS}
    return Imported(settings, {**weights, **rope.weights}, layout, changes | interleaves(c, weights))


def turned(c: Config, base: Setting, n: int) -> list[bool] | None:
    """Which layers rope turns: those with a base, which is the same for all; None where nothing says it."""
    bases = c.get_numbers("layer_rope_theta", n)
    if bases is None:
        return None
    if others := {*bases} - {0, base}:
        c.refuse(
            f"layer_rope_theta has {min(others):g} beside rope's base of {base}: hetrun has one base only"
        )
    return [found != 0 for found in bases]


def tensors(hf: HfModel, n: int, head_dim: int) -> dict[str, Weight]:
    """All tensors by GGUF name, where norms of heads have gains: what the settings multiply queries by."""
    found, c = ImportTensors(hf), hf.config
    found.take_ends(tied=c.get_bool("tie_word_embeddings", False))
    gains = {"attn_q_norm": c.get_float("qk_scale_factor", 3.87), "attn_k_norm": 1.0}
    biased = ATTENTION if c.get_bool("attention_bias", False) else ()
    names = {**NORMS, **ATTENTION, **FEED_FORWARD, "attn_gate": "self_attn.gate_proj"}
    for i in range(n):
        found.take_layer(i, names, biased)
        for ours, gain in gains.items():
            tensor = f"blk.{i}.{ours}.weight"
            found.put(tensor, constant(tensor, np.full(head_dim, gain, np.float32)))
    return found.finish()
