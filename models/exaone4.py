"""EXAONE 4: norms after attention and feed-forward, normed heads, no rope in some layers beside windows."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import Config, HfModel, Imported, Setting
from hetrun.models.decoder import build_decoder, by_period, plain_ffn, read_decoder, read_pattern
from hetrun.models.hf_import import (
    decoder_settings,
    decoder_weights,
    head_dim_of,
    not_in_gguf,
    sliding_layers,
)
from hetrun.models.olmo2 import NORMS
from hetrun.models.rope import rope_from_hf

name = "exaone4"

PERIOD = 4  # layers from one that sees all to the next, where the settings say nothing
WINDOW = 4096  # in the same case
WINDOWED = 64  # layers of the model that llama.cpp knows to have windows


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=False, head_norms=True)
    usual = WINDOW if d.n_layers == WINDOWED else 0
    window = meta.get_int("attention.sliding_window", usual, 0, 1 << 31)
    slides = read_pattern(meta, d.n_layers, PERIOD) if window else (False,) * d.n_layers
    d = replace(
        d,
        windows=tuple(window if s else 0 for s in slides),
        ropes=tuple(d.rope if s or not window else None for s in slides),
        norms="after",
    )
    return build_decoder(b, d, plain_ffn(b, d))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    head_dim, n = head_dim_of(c), c.require_int("num_hidden_layers", 1, 1 << 12)
    rope, windows = rope_from_hf(c, head_dim), sliding(c, n)
    settings = decoder_settings(c, head_dim, rope) | windows
    weights = decoder_weights(hf, head_norms=True, norms=NORMS)
    only_here = not_in_gguf(
        (
            bool(windows) != (n == WINDOWED),
            f"llama.cpp's {name} has windows where there are {WINDOWED} layers, and nowhere else",
        ),
        (
            weights["blk.0.attn_q.weight"].shape[0] != settings["embedding_length"],
            f"llama.cpp's {name} has no head_dim of its own",
        ),
    )
    return Imported(settings, {**weights, **rope.weights}, {**rope.layout, **only_here})


def sliding(c: Config, n: int) -> dict[str, Setting]:
    """Which layers have a window: layer_types says it, else a pattern: a period, or a letter for each."""
    slides = sliding_layers(c, n)
    if c.is_null("sliding_window"):
        if slides and any(slides):
            c.refuse("layer_types has sliding_attention, but there is no sliding_window")
        return {}
    pattern = c.get("sliding_window_pattern")
    if slides is None and isinstance(pattern, str) and pattern:
        slides = [pattern[i % len(pattern)] == "L" for i in range(n)]
    if slides is None:
        slides = by_period(n, c.get_int("sliding_window_pattern", PERIOD, 1, 1 << 12))
    return {
        "attention.sliding_window": c.get_int("sliding_window", WINDOW, 1, 1 << 31),
        "attention.sliding_window_pattern": tuple(slides),
    }
