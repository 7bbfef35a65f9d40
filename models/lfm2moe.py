"""LFM2 (mixture of experts in most layers)."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import HfModel, Imported, Setting
from hetrun.models import lfm2
from hetrun.models.decoder import read_decoder
from hetrun.models.hf_import import FEED_FORWARD, ImportTensors, MixtureExtras, experts_apart, not_in_gguf
from hetrun.models.mixtures import SIGMOID, mixed_ffn, mixture_settings, read_mixtures

name = "lfm2moe"

MIXING = MixtureExtras("mlp.expert_bias")


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=False, head_norms=True)
    mixtures = read_mixtures(b, meta, SIGMOID, normalise=True)
    return lfm2.build_between_gates(b, meta, d, mixed_ffn(b, mixtures))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    hf = lfm2.in_other_words(hf)
    c, n = hf.config, hf.config.require_int("num_experts", 1, 1 << 16)
    apart = experts_apart(hf, n)
    found = ImportTensors(apart)
    lfm2.take_layers(found, c)
    for i in range(c.require_int("num_hidden_layers", 1, 1 << 12)):
        if apart.has(f"{found.root}layers.{i}.mlp.gate.weight"):
            found.take_experts(i, n)
            found.take_mixing(i, MIXING)
        else:
            found.take_layer(i, FEED_FORWARD, ())
    mixture: dict[str, Setting] = {
        **mixture_settings(c, "num_experts", SIGMOID, normalise=True),
        "leading_dense_block_count": c.get_int("num_dense_layers", 2, 0, 1 << 12),
    }
    made = lfm2.imported(c, found.finish(), name).with_settings(mixture)
    only_here = not_in_gguf((not mixture["expert_weights_norm"], f"llama.cpp's {name} always normalises"))
    return replace(made, layout={**only_here, **made.layout})
