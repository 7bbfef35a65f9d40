"""Hunyuan A13B: heads that are normed after rope, and a mixture beside an expert that all rows share."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Weight
from hetrun.loader.hf_mapping import Config, HfModel, Imported, Setting
from hetrun.models.decoder import build_decoder, read_decoder
from hetrun.models.hf_import import (
    ATTENTION,
    MixtureExtras,
    decoder_settings,
    decoder_weights,
    experts_apart,
    head_dim_of,
    not_in_gguf,
)
from hetrun.models.mixtures import SOFTMAX, mixed_ffn, read_mixtures
from hetrun.models.rope import KINDS, HfRope, RopeSettings, dynamic, rope_from_hf

name = "hunyuan-moe"

OTHER_WORDS = {"query_layernorm": "q_norm", "key_layernorm": "k_norm", "gate.wg": "gate"}


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = replace(read_decoder(b, meta, interleaved=False, head_norms=True), turned_first=True)
    mixtures = read_mixtures(b, meta, SOFTMAX, normalise=True)
    return build_decoder(b, d, mixed_ffn(b, mixtures))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    head_dim = head_dim_of(c)
    rope = rope_from_hf(c, head_dim, kinds={**KINDS, "dynamic": stretched})
    n = c.require_int("num_experts", 1, 1 << 16)
    n_ff = c.require_int("intermediate_size", 1, 1 << 24)
    mixture: dict[str, Setting] = {
        "expert_count": n,
        "expert_used_count": alike(c, "moe_topk", 1),
        "expert_feed_forward_length": n_ff,
        "expert_shared_feed_forward_length": n_ff,
        "expert_shared_count": 1,
    }
    for key, only in (("moe_intermediate_size", n_ff), ("num_shared_expert", 1)):
        if (found := alike(c, key, only)) != only:
            c.refuse(f"{key} is {found}; hetrun runs models of its type with {only} only")
    if c.get_bool("use_cla", False):
        c.refuse("use_cla is true: layers that share keys and values are not done for models of its type")
    settings = decoder_settings(c, head_dim, rope) | mixture
    biased = ATTENTION if c.get_bool("attention_bias", False) else ()
    apart = experts_apart(HfModel(c, usual_words(hf)), n)
    weights = decoder_weights(apart, biased, n, head_norms=True, mixing=MixtureExtras("", "mlp.shared_mlp"))
    only_here = not_in_gguf((bool(biased), f"llama.cpp's {name} has no bias after attention"))
    return Imported(settings, {**weights, **rope.weights}, {**rope.layout, **only_here})


def stretched(asked: RopeSettings) -> HfRope:
    """With an alpha the base is larger, and stays the same however long a text is."""
    if not asked.scaling.has("alpha"):
        return dynamic(asked)
    power = asked.head_dim / (asked.head_dim - 2)
    return HfRope({"rope.freq_base": asked.base * asked.positive("alpha") ** power})


def alike(c: Config, key: str, default: int) -> int:
    """A number, or the one that each layer has; layers that differ are refused."""
    found = c.get_numbers(key, c.require_int("num_hidden_layers", 1, 1 << 12)) or (default,)
    if len({*found}) > 1:
        c.refuse(f"{key} is not the same in all layers, which hetrun does not do for models of its type")
    return int(found[0])


def usual_words(hf: HfModel) -> dict[str, Weight]:
    """The tensors as other mixtures have them."""
    out: dict[str, Weight] = {}
    for theirs, weight in hf.tensors.items():
        for words, usual in OTHER_WORDS.items():
            theirs = theirs.replace(f".{words}.weight", f".{usual}.weight")
        out[theirs] = weight
    return out
