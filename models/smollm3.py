"""SmolLM 3: llama, of whose layers some are not turned by rope."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import Config, HfModel, Imported, Setting
from hetrun.models.decoder import build_decoder, plain_ffn, read_decoder
from hetrun.models.hf_import import (
    biased,
    decoder_settings,
    decoder_weights,
    head_dim_of,
    interleaves,
    layer_windows,
    not_in_gguf,
    sliding_layers,
    window_of,
)
from hetrun.models.rope import rope_from_hf

name = "smollm3"

INTERVAL = 4  # layers, of which the last is not turned; llama.cpp knows no other
TURNS = "rope.layers"


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=not meta.get_bool("rope.halves", False))
    turns = meta.get_numbers(TURNS, d.n_layers) or usual(d.n_layers, INTERVAL)
    d = replace(d, ropes=tuple(d.rope if turned else None for turned in turns))
    return build_decoder(b, d, plain_ffn(b, d))


def usual(n_layers: int, interval: int) -> tuple[bool, ...]:
    """All layers are turned but the last of each interval."""
    return tuple((i + 1) % interval != 0 for i in range(n_layers))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    head_dim, n = head_dim_of(c), c.require_int("num_hidden_layers", 1, 1 << 12)
    rope = rope_from_hf(c, head_dim, base=2000000.0)
    turns = turned(c, n)
    windows = sliding(c, turns)
    settings = decoder_settings(c.without("no_rope_layers"), head_dim, rope) | windows
    tied = HfModel(c.with_defaults({"tie_word_embeddings": True}), hf.tensors)
    weights = decoder_weights(tied, biased(c))
    only_here = not_in_gguf(
        (turns != usual(n, INTERVAL), f"llama.cpp's {name} has rope in all but every fourth layer"),
        (bool(windows), f"llama.cpp's {name} has no windows"),
    )
    layout: dict[str, Setting] = {"rope.halves": True, TURNS: turns, **rope.layout, **only_here}
    return Imported(settings, {**weights, **rope.weights}, layout, interleaves(c, weights))


def turned(c: Config, n: int) -> tuple[bool, ...]:
    """Which layers rope turns: a number for each, or all but the last of each interval."""
    interval = c.get_int("no_rope_layer_interval", INTERVAL, 1, 1 << 12)
    found = c.get_numbers("no_rope_layers", n)
    return usual(n, interval) if found is None else tuple(map(bool, found))


def sliding(c: Config, turns: tuple[bool, ...]) -> dict[str, Setting]:
    """Windows count only where another setting says so, in the layers named, or in those without rope."""
    if not c.get_bool("use_sliding_window", False):
        return {}
    window = window_of(c, 0)
    usual = [not turned and window is not None for turned in turns]
    return layer_windows(c, window, sliding_layers(c, len(turns)) or usual)
