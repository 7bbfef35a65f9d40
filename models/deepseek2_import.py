"""DeepSeek 2 and its relatives as Hugging Face publishes them, in GGUF's words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from hetrun.graph import Weight, stack
from hetrun.graph.remade import turned
from hetrun.loader.hf_mapping import Config, HfModel, Imported, Setting
from hetrun.models.hf_import import (
    FEED_FORWARD,
    NORMS,
    ImportTensors,
    MixtureExtras,
    decoder_settings,
    experts_apart,
    not_in_gguf,
    predicting_last,
    rope_factors,
)
from hetrun.models.mixtures import SIGMOID, SOFTMAX, mixture_settings
from hetrun.models.rope import HfRope, rope_from_hf, rope_settings, yarn_attention_factor

name = "deepseek2"

HALVES, MAGNITUDE = "rope.halves", "rope.magnitude"  # settings of ours
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
GROUPED = "group_limited_greedy"
MIXING = MixtureExtras("mlp.gate.e_score_correction_bias", "mlp.shared_experts")
LATENT = {
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_output": "self_attn.o_proj",
}
AT_ONCE = {"attn_q": "self_attn.q_proj"}
IN_TWO = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
}


def read_folder(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    hf, predicting = predicting_last(hf)
    c = hf.config
    if c.get_bool("attention_bias", False):
        c.refuse("attention_bias is true, and biases are not done in models of its type")
    by_softmax = c.get_str("model_type", "") == "deepseek_v2"
    if (method := c.get_str("topk_method", "greedy")) not in ("greedy", GROUPED, "noaux_tc"):
        c.refuse(f"topk_method is {method[:40]!r}, which hetrun does not know")
    if by_softmax and method == "greedy":
        c = c.without("n_group")
    heads = latent_settings(c)
    rope, all_dim, magnitude = latent_rope(c)
    scores = SOFTMAX if by_softmax else SIGMOID
    mixture = mixture_settings(c, "n_routed_experts", scores, normalise=not by_softmax)
    weights = tensors(HfModel(c, hf.tensors), heads)
    dense = c.get_int("first_k_dense_replace", 0, 0, 1 << 12)
    settings = decoder_settings(c, 1, rope) | heads | mixture | {"leading_dense_block_count": dense}
    settings |= predicting
    if all_dim:
        settings[LOG_MULTIPLIER] = 0.1 * all_dim
    halves = not c.get_bool("rope_interleave", True)
    only_here = not_in_gguf(
        rope_factors(rope, name),
        (halves, f"llama.cpp's {name} turns neighbouring columns"),
        (
            is_yarn(rope) and not all_dim,
            f"llama.cpp's {name} knows YaRN with mscale_all_dim only",
        ),
        (magnitude != 1, f"llama.cpp's {name} has mscale and mscale_all_dim alike"),
        (by_softmax and method == GROUPED, f"llama.cpp's {name} measures groups by two experts"),
    )
    layout: dict[str, Setting] = {HALVES: halves, MAGNITUDE: magnitude, **rope.layout, **only_here}
    return Imported(settings, {**weights, **rope.weights}, layout)


def latent_settings(c: Config) -> dict[str, Setting]:
    """The sizes of attention as GGUF names them: one latent head of keys."""
    rank, n_rot = c.require_int("kv_lora_rank", 1, 1 << 16), c.require_int("qk_rope_head_dim", 2, 1 << 12)
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + n_rot,
        "attention.value_length": rank,
        "attention.key_length_mla": c.require_int("qk_nope_head_dim", 1, 1 << 12) + n_rot,
        "attention.value_length_mla": c.require_int("v_head_dim", 1, 1 << 12),
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": 0 if c.is_null("q_lora_rank") else c.get_int("q_lora_rank", 0, 0, 1 << 16),
        "rope.dimension_count": n_rot,
    }


def latent_rope(c: Config) -> tuple[HfRope, float, float]:
    """Rope; how much larger YaRN makes scores (`mscale_all_dim`, 0 where it does not); and by what it then
    multiplies cos and sin, in place of rope's own attention factor."""
    rope, asked = rope_from_hf(c, c.require_int("qk_rope_head_dim", 2, 1 << 12)), rope_settings(c)
    all_dim = asked.get_float("mscale_all_dim", 0.0)
    if not all_dim or asked.get_str("rope_type", asked.get_str("type", "default")) == "default":
        return rope, 0.0, 1.0
    if not is_yarn(rope):
        c.refuse("its rope has mscale_all_dim, which hetrun does for YaRN with its usual betas only")
    factor = rope.settings["rope.scaling.factor"]
    assert isinstance(factor, float)
    settings = {key: said for key, said in rope.settings.items() if key != "rope.scaling.attn_factor"}
    magnitude = yarn_attention_factor(asked, factor)
    return replace(rope, settings=settings), all_dim, 1.0 if math.isclose(magnitude, 1) else magnitude


def is_yarn(rope: HfRope) -> bool:
    """Whether GGUF's keys say its scaling."""
    return rope.settings.get("rope.scaling.type") == "yarn"


def tensors(hf: HfModel, heads: Mapping[str, Setting]) -> dict[str, Weight]:
    """All tensors by GGUF name, with the matrices of each head's keys and values apart."""
    c = hf.config
    n_experts = c.require_int("n_routed_experts", 1, 1 << 16)
    found = ImportTensors(experts_apart(hf, n_experts))
    found.take_ends(tied=c.get_bool("tie_word_embeddings", False))
    queries = IN_TWO if heads["attention.q_lora_rank"] else AT_ONCE
    n, plain = c.require_int("num_attention_heads", 1, 1 << 14), c.require_int("qk_nope_head_dim", 1, 1 << 12)
    for i in range(c.require_int("num_hidden_layers", 1, 1 << 12)):
        layer = f"{found.root}layers.{i}"
        found.take_layer(i, {**NORMS, **LATENT, **queries}, ())
        take_heads(found, i, found.use(f"{layer}.self_attn.kv_b_proj.weight"), n, plain)
        if hf.has(f"{layer}.mlp.gate.weight"):
            found.take_experts(i, n_experts)
            found.take_mixing(i, MIXING)
        else:
            found.take_layer(i, FEED_FORWARD, ())
        found.take_predicting(i)
    return found.finish()


def take_heads(found: ImportTensors, i: int, both: Weight, n: int, plain: int) -> None:
    """The matrices of keys, turned so that queries go through them, and those of values."""
    each = both.shape[0] // n
    heads = [both.rows(h * each, (h + 1) * each) for h in range(n)]
    found.put(f"blk.{i}.attn_k_b.weight", stack([turned(head.rows(0, plain), 1) for head in heads]))
    found.put(f"blk.{i}.attn_v_b.weight", stack([head.rows(plain, each) for head in heads]))
