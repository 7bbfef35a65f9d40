"""Llama, Mistral, Mixtral, SmolLM and TinyLlama: models that GGUF calls llama."""

from __future__ import annotations

from collections.abc import Mapping

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.graph.ops import Moe
from hetrun.loader.hf_mapping import Config, HfModel, Imported, Setting
from hetrun.models import blocks
from hetrun.models.decoder import build_decoder, plain_ffn, read_decoder
from hetrun.models.hf_import import (
    biased,
    decoder_settings,
    decoder_weights,
    experts_apart,
    head_dim_of,
    interleaves,
    layer_windows,
)
from hetrun.models.rope import rope_from_hf

name = "llama"

MISTRAL_WINDOW = 4096  # where a config does not even say null
# Mixtral's own words, and those of transformers 5.
MIXTRAL = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=not meta.get_bool("rope.halves", False))
    n_experts = meta.get_int("expert_count", 0, 0, 1 << 16)
    if not n_experts:
        return build_decoder(b, d, plain_ffn(b, d))
    moe = Moe(n_experts, meta.require_int("expert_used_count", 1, n_experts), d.n_ff, normalise=True)
    return build_decoder(b, d, lambda x, i: blocks.mixture(b, x, f"blk.{i}", moe))


def from_hf(hf: HfModel) -> Imported:
    """llama, mistral and mixtral, each with the halves of its heads, which rope turns together, apart."""
    c = hf.config
    mixtral = c.get_str("model_type", name) == "mixtral"
    head_dim = head_dim_of(c)
    rope = rope_from_hf(c, head_dim, base=1000000.0 if mixtral else 10000.0)
    settings = decoder_settings(c, head_dim, rope) | windows(c)
    if mixtral:
        n_experts = c.require_int("num_local_experts", 1, 1 << 16)
        n_used = c.require_int("num_experts_per_tok", 1, n_experts)
        settings |= {"expert_count": n_experts, "expert_used_count": n_used}
        weights = decoder_weights(experts_apart(renamed(hf, MIXTRAL), n_experts), n_experts=n_experts)
    else:
        weights = decoder_weights(hf, biased(c))
    layout: dict[str, Setting] = {"rope.halves": True, **rope.layout}
    return Imported(settings, {**weights, **rope.weights}, layout, interleaves(c, weights))


def windows(c: Config) -> dict[str, Setting]:
    """Mistral's and mixtral's layers all have a window, or none has; llama has no such setting."""
    kind, n_layers = c.get_str("model_type", name), c.require_int("num_hidden_layers", 1, 1 << 12)
    if kind == "llama":
        return {}
    usual = MISTRAL_WINDOW if kind == "mistral" and not c.is_null("sliding_window") else 0
    window = c.get_int("sliding_window", usual, 0, 1 << 31)
    types = set(c.get_strings("layer_types", n_layers) or ())
    if types - {"sliding_attention" if window else "full_attention"}:
        c.refuse(f"layer_types says {min(types)[:40]!r}; the layers of a {kind} model are all of one type")
    return layer_windows(c, window, [window > 0])


def renamed(hf: HfModel, words: Mapping[str, str]) -> HfModel:
    """The same tensors with other words in their names."""
    out = {}
    for theirs, weight in hf.tensors.items():
        for word, other in words.items():
            theirs = theirs.replace(word, other)
        out[theirs] = weight
    return HfModel(hf.config, out)
