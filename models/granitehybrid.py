"""Granite 4: Mamba 2 in most layers, attention without rope in the others, and mixtures in some models."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Value, Weight
from hetrun.loader.hf_mapping import Config, HfModel, Imported, Setting
from hetrun.models import blocks
from hetrun.models.decoder import attention, build_decoder, norm, plain_ffn, read_attending, read_decoder
from hetrun.models.granite import FACTORS, with_factors
from hetrun.models.granitemoe import usual_words
from hetrun.models.hf_import import (
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    ImportTensors,
    MixtureExtras,
    decoder_settings,
    experts_apart,
    head_dim_of,
    interleaves,
    not_in_gguf,
)
from hetrun.models.mamba2 import LOG, mamba2, mamba2_changes, mamba2_settings, read_mamba2, take_mamba2
from hetrun.models.mixtures import SOFTMAX, mixed_ffn, read_mixtures
from hetrun.models.rope import rope_from_hf

name = "granitehybrid"

TURNS = "rope.scaling.finetuned"  # GGUF's word for whether attention has rope
SHARED_ONLY = {ours: f"shared_{theirs}" for ours, theirs in FEED_FORWARD.items()}
ATTENDS = ("attention", "full_attention")


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = with_factors(b, meta, read_decoder(b, meta, interleaved=not meta.get_bool("rope.halves", False)))
    if not meta.get_bool(TURNS, True):
        d = replace(d, ropes=(None,) * d.n_layers)
    m, attends = read_mamba2(b, meta, d.eps), read_attending(meta)
    mixed = meta.get_int("expert_count", 0, 0, 1 << 16) > 0
    feed_forward = mixed_ffn(b, read_mixtures(b, meta, SOFTMAX, normalise=True)) if mixed else plain_ffn(b, d)

    def attend(x: Value, i: int) -> Value:
        if attends[i]:
            return attention(b, x, d, i)
        last = i == d.n_layers - 1
        y = mamba2(b, norm(b, x, f"blk.{i}.attn_norm", d, "before"), m, i, last)
        x = blocks.select(b, x) if last else x
        return blocks.add(b, x, blocks.scaled(b, y, d.residual_scale, "out"), part="out")

    return build_decoder(b, d, feed_forward, attend)


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    head_dim = head_dim_of(c)
    rope = rope_from_hf(c, head_dim)
    n_experts = c.get_int("num_local_experts", 8, 0, 1 << 16)
    shared = c.get_int("shared_intermediate_size", 1024, 1, 1 << 24)
    attends = attending(c)
    plain = c
    for theirs in FACTORS.values():
        plain = plain.without(theirs)
    if not n_experts:  # the shared expert is all that there is
        plain = plain.without("intermediate_size").with_defaults({"intermediate_size": shared})
    settings = decoder_settings(plain, head_dim, rope) | mamba2_settings(c)
    settings |= {ours: c.get_float(theirs, 1.0) for ours, theirs in FACTORS.items()}
    kv_heads = settings["attention.head_count_kv"]
    assert isinstance(kv_heads, int)
    if not all(attends):
        settings["attention.head_count_kv"] = tuple(kv_heads if yes else 0 for yes in attends)
    settings[TURNS] = c.get("position_embedding_type") == "rope"
    if n_experts:
        settings |= {
            "expert_count": n_experts,
            "expert_used_count": c.require_int("num_experts_per_tok", 1, n_experts),
            "expert_shared_feed_forward_length": shared,
        }
    found = tensors(HfModel(c, usual_words(hf, shared)), attends, n_experts)
    layout: dict[str, Setting] = {"rope.halves": True, LOG: True, **rope.layout}
    heads = settings["ssm.time_step_rank"]
    assert isinstance(heads, int)
    only_here = not_in_gguf(
        (c.get_int("mamba_expand", 2, 1, 64) != 2, f"llama.cpp's {name} has mamba_expand 2 only"),
        (all(attends), f"llama.cpp's {name} has layers of Mamba"),
    )
    changes = interleaves(c, found) | mamba2_changes(heads, dict(found))
    return Imported(settings, {**found, **rope.weights}, {**layout, **only_here}, changes)


def attending(c: Config) -> tuple[bool, ...]:
    """Which layers have attention."""
    n = c.require_int("num_hidden_layers", 1, 1 << 12)
    types = c.get_strings("layer_types", n) or c.get_strings("layers_block_type", n) or ("mamba",) * n
    if others := set(types) - {*ATTENDS, "mamba", "linear_attention"}:
        c.refuse(f"layer_types has {min(others)[:40]!r}; models of its type have mamba and attention")
    return tuple(kind in ATTENDS for kind in types)


def tensors(hf: HfModel, attends: tuple[bool, ...], n_experts: int) -> dict[str, Weight]:
    """All tensors by GGUF name."""
    c = hf.config
    found = ImportTensors(experts_apart(hf, n_experts) if n_experts else hf)
    found.take_ends(tied=c.get_bool("tie_word_embeddings", False))
    for i, attended in enumerate(attends):
        if attended:
            found.take_layer(i, ATTENTION, ATTENTION if c.get_bool("attention_bias", False) else ())
        else:
            take_mamba2(found, i, f"{found.root}layers.{i}.mamba", c.get_bool("mamba_conv_bias", True))
        found.take_layer(i, NORMS, ())
        if n_experts:
            found.take_experts(i, n_experts)
            found.take_mixing(i, MixtureExtras("", "shared_mlp"))
        else:
            found.take_layer(i, SHARED_ONLY, ())
    return found.finish()
