"""The tiny models that tests make with transformers: one row for each thing a model can have of its own.

Rows of one family that differ in a setting only have the same weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.models.hf import Row
from tests.support.tiers import exhaustive, pairwise


def rope(kind: str, **settings: float | str | bool | list[float]) -> dict[str, Any]:
    """`rope_parameters` of one kind."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
BETAS = {"beta_fast": 4.0, "beta_slow": 0.5}
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64
}  # fmt: skip
LONGROPE: dict[str, Any] = {
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [1.0 + 0.5 * i for i in range(16)],
    "original_max_position_embeddings": 32,
}

LLAMA = (
    Row("mha", "llama", {"num_key_value_heads": 4, "num_hidden_layers": 3}),
    Row("gqa", "llama"),
    Row("gqa-v4", "llama", style=4),
    Row("mqa", "llama", {"num_key_value_heads": 1}),
    Row("tied", "llama", {"tie_word_embeddings": True}),
    Row("own-head-dim", "llama", {"head_dim": 64}),
    Row("attention-bias", "llama", {"attention_bias": True}),
    Row("all-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Row("bf16", "llama", {"attention_bias": True}, dtype=torch.bfloat16),
    Row("f16", "llama", {"attention_bias": True}, dtype=torch.float16),
    Row("sharded", "llama", shard="100KB"),
    Row("theta-v4", "llama", rope("default", rope_theta=500000.0), style=4),
    Row("linear", "llama", rope("linear", factor=4.0)),
    Row("linear-v4", "llama", rope("linear", factor=4.0), style=4),
    Row("llama3", "llama", rope("llama3", **LLAMA3)),
    Row("llama3-v4", "llama", rope("llama3", **LLAMA3), style=4),
    Row("yarn", "llama", rope("yarn", **YARN)),
    Row("yarn-v4", "llama", rope("yarn", **YARN), style=4),
    Row("yarn-attention-factor", "llama", rope("yarn", **YARN, attention_factor=0.7)),
    Row("yarn-mscale", "llama", rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.4)),
    Row("yarn-betas", "llama", rope("yarn", **YARN, **BETAS)),
    Row("yarn-smooth", "llama", rope("yarn", **YARN, **BETAS, truncate=False)),
    Row("dynamic", "llama", rope("dynamic", factor=4.0)),
    Row("longrope", "llama", rope("longrope", **LONGROPE)),
    Row("longrope-short", "llama", rope("longrope", **LONGROPE | {"original_max_position_embeddings": 256})),
    Row("proportional", "llama", rope("proportional", partial_rotary_factor=0.5)),
)

MISTRAL = (
    Row("window", "mistral", {"sliding_window": 8}),
    Row("window-v4", "mistral", {"sliding_window": 8}, style=4),
    Row("no-window", "mistral", {"sliding_window": None}),
    Row("own-head-dim", "mistral", {"sliding_window": None, "head_dim": 64}),
    Row("yarn", "mistral", {"sliding_window": None, **rope("yarn", **YARN)}),
)

GPT = {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 8}
SMOOTH = rope("yarn", **YARN, truncate=False)
GPT_OSS = (
    Row("plain", "gpt_oss", {**GPT, "num_hidden_layers": 3, **SMOOTH}),
    Row("truncated", "gpt_oss", {**GPT, **rope("yarn", **YARN)}),
    Row("betas", "gpt_oss", {**GPT, **rope("yarn", **YARN, **BETAS, truncate=False)}),
    Row("attention-factor", "gpt_oss", {**GPT, **rope("yarn", **YARN, truncate=False, attention_factor=0.7)}),
    Row("no-yarn", "gpt_oss", {**GPT, **rope("default")}),
    Row("no-yarn-bf16", "gpt_oss", {**GPT, **rope("default")}, dtype=torch.bfloat16),
    Row("no-yarn-layer-types", "gpt_oss",
        {**GPT, "layer_types": ["full_attention", "sliding_attention"], **rope("default")}),
    Row("no-attention-bias", "gpt_oss", {**GPT, "attention_bias": False, **SMOOTH}),
)  # fmt: skip

SHARING = {
    "num_hidden_layers": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_routed_experts": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
GLM = {**SHARING, "head_dim": 32}
GLM4_MOE = (
    Row("plain", "glm4_moe", GLM, seed=1),
    Row("qk-norm", "glm4_moe", {**GLM, "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2}),
    Row("groups", "glm4_moe", {**GLM, "n_group": 4, "topk_group": 2}),
    Row("not-normalised", "glm4_moe", {**GLM, "norm_topk_prob": False, "tie_word_embeddings": True}),
    Row("whole-heads", "glm4_moe", {**GLM, **rope("default", partial_rotary_factor=1.0)}),
    Row("fused", "glm4_moe", GLM, fused_experts=True),
)

LATENT: dict[str, Any] = {
    **SHARING, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
LESS = {"mscale": 0.707, "mscale_all_dim": 0.707}
LITE = {**LATENT, "q_lora_rank": None, "routed_scaling_factor": 1.0, "n_shared_experts": 2}
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
DEEPSEEK2 = (
    Row("plain", "deepseek_v2", LITE),
    Row("yarn", "deepseek_v2", {**LITE, **rope("yarn", **YARN, **LESS)}),
    Row("groups", "deepseek_v2", {**LATENT, **GROUPED, "routed_scaling_factor": 16.0}),
    Row("fused", "deepseek_v2", LITE, fused_experts=True),
    Row("plain", "deepseek_v3", {**LATENT, "n_group": 1, "topk_group": 1}),
    Row("groups", "deepseek_v3", {**LATENT, "n_group": 4, "topk_group": 2}),
    Row("yarn", "deepseek_v3", {**LATENT, "n_group": 4, "topk_group": 2, **rope("yarn", **YARN, **MSCALE)}),
    Row("yarn-alone", "deepseek_v3", {**LATENT, "n_group": 1, "topk_group": 1, **rope("yarn", **YARN)}),
    Row("halves", "deepseek_v3", {**LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False}),
    Row("plain", "glm4_moe_lite", {**LATENT, "qk_nope_head_dim": 48, "v_head_dim": 64}),
    Row("tied", "glm4_moe_lite", {**LATENT, "tie_word_embeddings": True, "norm_topk_prob": False}),
)

SHORT = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3}
NARROW = {"intermediate_size": 96, "block_auto_adjust_ff_dim": False}
LFM2 = (
    Row("plain", "lfm2", {**SHORT, **NARROW, "tie_word_embeddings": True}),
    Row("adjusted", "lfm2", {**SHORT, "intermediate_size": 96, "block_multiple_of": 32}),
    Row(
        "attention-last",
        "lfm2",
        {**SHORT, **NARROW, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    ),
    Row("longer", "lfm2", {**SHORT, **NARROW, "conv_L_cache": 5}),
    Row("bf16", "lfm2", {**SHORT, **NARROW}, dtype=torch.bfloat16),
)
SHORT_MOE = {
    **SHORT,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "num_dense_layers": 1,
}
LFM2_MOE = (
    Row("plain", "lfm2_moe", {**SHORT_MOE, "tie_word_embeddings": True}),
    Row("scaled", "lfm2_moe", {**SHORT_MOE, "routed_scaling_factor": 2.5}),
    Row("no-bias", "lfm2_moe", {**SHORT_MOE, "use_expert_bias": False}),
    Row("not-normalised", "lfm2_moe", {**SHORT_MOE, "norm_topk_prob": False}),
    Row("fused", "lfm2_moe", SHORT_MOE, fused_experts=True),
)

SCANS = {
    "num_hidden_layers": 4, "layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_n_heads": 8,
    "mamba_d_head": 32, "mamba_d_state": 32, "shared_intermediate_size": 96, "num_local_experts": 8,
    "num_experts_per_tok": 3, "intermediate_size": 64, "embedding_multiplier": 4.0, "logits_scaling": 2.0,
    "residual_multiplier": 0.5, "attention_multiplier": 0.25,
}  # fmt: skip
GRANITE_HYBRID = (
    Row("plain", "granitemoehybrid", SCANS),
    Row("no-experts", "granitemoehybrid", {**SCANS, "num_local_experts": 0, "tie_word_embeddings": True}),
    Row("rope", "granitemoehybrid", {**SCANS, "position_embedding_type": "rope"}),
    Row("no-conv-bias", "granitemoehybrid", {**SCANS, "mamba_conv_bias": False}),
    Row("attention-last", "granitemoehybrid",
        {**SCANS, "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "attention_bias": True}),
    Row("attention-only", "granitemoehybrid",
        {**SCANS, "layer_types": ["attention"] * 4, "position_embedding_type": "rope"}),
    Row("fused", "granitemoehybrid", SCANS, fused_experts=True),
    Row("bf16", "granitemoehybrid", {**SCANS, "num_local_experts": 0}, dtype=torch.bfloat16),
)  # fmt: skip

DOTS = {**SHARING, "num_key_value_heads": 4, "norm_topk_prob": True}
DOTS1 = (
    Row("plain", "dots1", DOTS, seed=1),
    Row("not-normalised", "dots1", {**DOTS, "norm_topk_prob": False, "n_shared_experts": 2}),
    Row("groups", "dots1", {**DOTS, "n_group": 4, "topk_group": 2}),
    Row("gqa", "dots1", {**DOTS, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    Row("attention-bias", "dots1", {**DOTS, "attention_bias": True}),
    Row("window", "dots1", {**DOTS, "sliding_window": 8, "max_window_layers": 1}),
    Row("fused", "dots1", DOTS, fused_experts=True),
)

TRINITY = {
    "num_hidden_layers": 5, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "sliding_window": 8,
    "moe_intermediate_size": 64, "num_shared_experts": 1, "num_dense_layers": 2, "route_scale": 2.8,
    "mup_enabled": True, **rope("default"),
}  # fmt: skip
AFMOE = (
    Row("plain", "afmoe", TRINITY),
    Row("two-shared", "afmoe", {**TRINITY, "num_shared_experts": 2, "num_dense_layers": 1}),
    Row("not-scaled", "afmoe", {**TRINITY, "mup_enabled": False}),
    Row("every-second", "afmoe", {**TRINITY, "global_attn_every_n_layers": 2}),
    Row("tied", "afmoe", {**TRINITY, "tie_word_embeddings": True, "attention_bias": True}),
    Row("yarn", "afmoe", {**TRINITY, **rope("yarn", **YARN)}),
    Row("fused", "afmoe", TRINITY, fused_experts=True),
)

HUNYUAN = {"head_dim": 32, "num_experts": 8, "moe_topk": 3, "intermediate_size": 64}
HUNYUAN_MOE = (
    Row("plain", "hunyuan_v1_moe", HUNYUAN),
    Row("alpha", "hunyuan_v1_moe", {**HUNYUAN, **rope("dynamic", alpha=1000.0, factor=1.0)}),
    Row("alpha-v4", "hunyuan_v1_moe", {**HUNYUAN, **rope("dynamic", alpha=1000.0, factor=1.0)}, style=4),
    Row("for-each-layer", "hunyuan_v1_moe", {**HUNYUAN, "moe_topk": [3, 3], "tie_word_embeddings": True}),
    Row("attention-bias", "hunyuan_v1_moe", {**HUNYUAN, "attention_bias": True}),
    Row("fused", "hunyuan_v1_moe", HUNYUAN, fused_experts=True),
    Row("bf16", "hunyuan_v1_moe", HUNYUAN, dtype=torch.bfloat16),
)

MINIMAX = {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 64}
MINIMAX_M2 = (
    Row("plain", "minimax_m2", {**MINIMAX, **rope("default", partial_rotary_factor=0.5)}, seed=2),
    Row("whole-heads", "minimax_m2", {**MINIMAX, **rope("default")}),
    Row("fused", "minimax_m2", {**MINIMAX, **rope("default", partial_rotary_factor=0.5)}, fused_experts=True),
)

ERNIE = {
    "num_hidden_layers": 4, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 64,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
}  # fmt: skip
ERNIE4_5_MOE = (
    Row("plain", "ernie4_5_moe", ERNIE),
    Row("every-second", "ernie4_5_moe", {**ERNIE, "moe_layer_interval": 2, "moe_layer_start_index": 0}),
    Row("none-shared", "ernie4_5_moe", {**ERNIE, "moe_num_shared_experts": 0, "tie_word_embeddings": False}),
    Row("not-to-the-end", "ernie4_5_moe", {**ERNIE, "moe_layer_end_index": 2}),
)

GEMMA4 = {
    "num_hidden_layers": 4, "head_dim": 32, "global_head_dim": 64, "sliding_window": 8,
    "vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 32, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
EXPERTS4 = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 64,
}  # fmt: skip
ALIKE = {
    **GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1
}  # fmt: skip
GEMMA_4 = (
    Row(
        "plain", "gemma4_text", {**GEMMA4, "num_kv_shared_layers": 2, "final_logit_softcapping": 5.0}, seed=1
    ),
    Row("double-wide", "gemma4_text", {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    Row("others-lend", "gemma4_text", {**GEMMA4, "num_kv_shared_layers": 1}),
    Row(
        "keys-are-values",
        "gemma4_text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    Row("mixture", "gemma4_text", {**GEMMA4, **EXPERTS4, "hidden_size_per_layer_input": 0}, seed=3),
    Row("mixture-of-all", "gemma4_text", {**GEMMA4, **EXPERTS4, "num_kv_shared_layers": 2}),
)

GROWING = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
GROWING |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 16}
MINISTRAL3 = (
    Row("plain", "ministral3", {"head_dim": 32, **rope("yarn", **GROWING)}),
    Row("plain-v4", "ministral3", {"head_dim": 64, **rope("yarn", **GROWING)}, style=4),
    Row("betas", "ministral3", {"head_dim": 32, **rope("yarn", **GROWING | BETAS)}),
    Row("mscale", "ministral3", {"head_dim": 32, **rope("yarn", **GROWING | {"mscale": 0.7})}),
    Row("window", "ministral3", {"head_dim": 32, "sliding_window": 8, **rope("yarn", **GROWING)}),
    Row("bf16", "ministral3", {"head_dim": 32, **rope("yarn", **GROWING)}, dtype=torch.bfloat16),
)
SEES = {"model_type": "ministral3", "head_dim": 32, **rope("yarn", **GROWING)}
MISTRAL3 = (
    Row("plain", "mistral3", SEES),
    Row("tied", "mistral3", {**SEES, "tie_word_embeddings": True}),
    Row("mistral", "mistral3", {"model_type": "mistral", "head_dim": 64, "sliding_window": None}),
)

MUSE = {
    "num_hidden_layers": 5, "head_dim": 32, "sliding_window": 8, "qk_scale_factor": 1.7,
    "output_multiplier": 0.6, "final_logit_softcapping": 3.0, **rope("default", rope_theta=500000.0),
}  # fmt: skip
NEAR_FAR = ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
MUSE_GLIMMER = (
    Row("plain", "muse_glimmer", MUSE),
    Row("layer-types", "muse_glimmer",
        {**MUSE, "layer_types": NEAR_FAR, "layer_rope_theta": [0, 500000.0, 0, 500000.0, 0]}),
    Row("others-turn", "muse_glimmer", {**MUSE, "layer_rope_theta": [500000.0, 0, 0, 500000.0, 0]}),
    Row("own-epsilon", "muse_glimmer", {**MUSE, "post_norm_eps": 0.1}),
    Row("tied", "muse_glimmer", {**MUSE, "tie_word_embeddings": True}),
    Row("attention-bias", "muse_glimmer", {**MUSE, "attention_bias": True}),
    Row("bf16", "muse_glimmer", MUSE, dtype=torch.bfloat16),
)  # fmt: skip

EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
MIXTRAL = (
    Row("plain", "mixtral", EXPERTS),
    Row("plain-v4", "mixtral", {**EXPERTS, "num_experts_per_tok": 3}, style=4),
    Row("window", "mixtral", {**EXPERTS, "sliding_window": 8}),
    Row("fused", "mixtral", EXPERTS, fused_experts=True),
    Row("bf16-sharded", "mixtral", EXPERTS, dtype=torch.bfloat16, shard="100KB"),
)

SLIDING = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 3}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
QWEN2 = (
    Row("plain", "qwen2"),
    Row("plain-v4", "qwen2", style=4),
    Row("tied", "qwen2", {"tie_word_embeddings": True}),
    Row("layer-types", "qwen2", MIXED),
    Row("max-window-layers-v4", "qwen2", {**SLIDING, "max_window_layers": 1}, style=4),
    Row("window-not-used-v4", "qwen2", {"sliding_window": 8, "max_window_layers": 0}, style=4),
    Row("yarn", "qwen2", rope("yarn", **YARN)),
    Row("yarn-v4", "qwen2", rope("yarn", **YARN), style=4),
    Row("yarn-betas", "qwen2", rope("yarn", **YARN, **BETAS)),
)

QWEN3 = (
    Row("plain", "qwen3", {"head_dim": 64}),
    Row("plain-v4", "qwen3", {"head_dim": 64}, style=4),
    Row("tied", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    Row("attention-bias", "qwen3", {"head_dim": 32, "attention_bias": True}),
    Row("yarn", "qwen3", {"head_dim": 32, **rope("yarn", **YARN)}),
    Row("layer-types", "qwen3", {"head_dim": 32, **MIXED}),
    Row("max-window-layers-v4", "qwen3", {"head_dim": 32, **SLIDING, "max_window_layers": 2}, style=4),
    Row("bf16", "qwen3", {"head_dim": 32}, dtype=torch.bfloat16),
)

SPARSE = {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
QWEN3_MOE = (
    Row("normalised", "qwen3_moe", {**SPARSE, "norm_topk_prob": True}),
    Row("normalised-v4", "qwen3_moe", {**SPARSE, "norm_topk_prob": True}, style=4),
    Row("not-normalised", "qwen3_moe", {**SPARSE, "norm_topk_prob": False}),
    Row("sparse-step", "qwen3_moe", {**SPARSE, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    Row("mlp-only-v4", "qwen3_moe", {**SPARSE, "mlp_only_layers": [1]}, style=4),
    Row("fused", "qwen3_moe", {**SPARSE, "norm_topk_prob": True}, fused_experts=True),
    Row("window", "qwen3_moe", {**SPARSE, "use_sliding_window": True, "sliding_window": 8}),
    Row("bf16", "qwen3_moe", {**SPARSE, "norm_topk_prob": True}, dtype=torch.bfloat16),
)

SECTIONS = rope("default", mrope_section=[6, 5, 5], mrope_interleaved=True)
SEEING = {
    "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, **SECTIONS
}  # fmt: skip
QWEN3_VL_MOE = (
    Row("plain", "qwen3_vl_moe", SEEING),
    Row("tied", "qwen3_vl_moe", {**SEEING, "tie_word_embeddings": True}),
    Row("bf16", "qwen3_vl_moe", SEEING, dtype=torch.bfloat16),
)

QWEN3_VL = (
    Row("plain", "qwen3_vl", {"head_dim": 32, **SECTIONS}),
    Row("plain-v4", "qwen3_vl", {"head_dim": 32, **SECTIONS}, style=4),
    Row("tied", "qwen3_vl", {"head_dim": 64, "tie_word_embeddings": True, **SECTIONS}),
    Row("bf16", "qwen3_vl", {"head_dim": 32, **SECTIONS}, dtype=torch.bfloat16),
)

SOME_TURN = {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}
SMOLLM3 = (
    Row("plain", "smollm3", {"num_hidden_layers": 5}),
    Row("interval", "smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    Row("some-turn", "smollm3", SOME_TURN),
    Row("windows", "smollm3", {**SOME_TURN, "use_sliding_window": True, "sliding_window": 8}),
    Row("layer-types", "smollm3", {**SOME_TURN, **MIXED}),
    Row("all-biases", "smollm3", {**SOME_TURN, "attention_bias": True, "mlp_bias": True}),
    Row("not-tied", "smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    Row("yarn", "smollm3", {"num_hidden_layers": 4, **rope("yarn", **YARN)}),
)
FACTORS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3,
    "logits_scaling": 2.5,
}  # fmt: skip
GRANITE = (
    Row("plain", "granite", FACTORS),
    Row("no-factors", "granite", {"tie_word_embeddings": True}),
    Row("all-biases", "granite", {**FACTORS, "attention_bias": True, "mlp_bias": True}),
    Row("llama3", "granite", {**FACTORS, **rope("llama3", **LLAMA3)}),
)
MANY_GRANITES = {**FACTORS, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 3}
GRANITE_MOE = (
    Row("plain", "granitemoe", {**MANY_GRANITES, "tie_word_embeddings": True}),
    Row("attention-bias", "granitemoe", {**MANY_GRANITES, "attention_bias": True}),
    Row("fused", "granitemoe", MANY_GRANITES, fused_experts=True),
    Row("shared", "granitemoeshared", {**MANY_GRANITES, "shared_intermediate_size": 96}),
    Row("none-shared", "granitemoeshared", {**MANY_GRANITES, "shared_intermediate_size": 0}),
    Row("fused", "granitemoeshared", {**MANY_GRANITES, "shared_intermediate_size": 96}, fused_experts=True),
    Row("bf16", "granitemoeshared", {**MANY_GRANITES, "shared_intermediate_size": 96}, dtype=torch.bfloat16),
)
ERNIE45 = (
    Row("plain", "ernie4_5", {"head_dim": 32, "tie_word_embeddings": False}),
    Row("tied", "ernie4_5", {"head_dim": 64}),
    Row("all-biases", "ernie4_5", {"head_dim": 32, "use_bias": True}),
)
GLM4 = (
    Row("plain", "glm4", {"head_dim": 32}),
    Row("tied", "glm4", {"head_dim": 64, "tie_word_embeddings": True}),
    Row("no-bias-v4", "glm4", {"head_dim": 32, "attention_bias": False}, style=4),
    Row("whole", "glm4", {"head_dim": 32, **rope("default", partial_rotary_factor=1.0)}),
)
OLMO_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 500000.0, **YARN},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    }
}
OLMO3 = {"num_hidden_layers": 4, "sliding_window": 8, **OLMO_ROPES}
OLMO = (
    Row("plain", "olmo2", {"tie_word_embeddings": False}),
    Row("tied", "olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    Row("windows", "olmo3", OLMO3),
    Row("windows-v4", "olmo3", OLMO3, style=4),
    Row("layer-types", "olmo3", {**OLMO3, **MIXED, "num_hidden_layers": 3}),
)
EXAONE = {"num_hidden_layers": 5, "sliding_window": 8}
EXAONE4 = (
    Row("plain", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    Row("windows", "exaone4", EXAONE),
    Row("windows-v4", "exaone4", {**EXAONE, "sliding_window_pattern": 2}, style=4),
    Row("layer-types", "exaone4", {**EXAONE, "layer_types": NEAR_FAR, "tie_word_embeddings": True}),
    Row("of-64-layers", "exaone4",
        {**EXAONE, "num_hidden_layers": 64, "hidden_size": 64, "intermediate_size": 64}),
    Row("own-head-dim", "exaone4",
        {"head_dim": 64, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    Row("llama3", "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, **rope("llama3", **LLAMA3)}),
)  # fmt: skip
SEED_OSS = (
    Row("plain", "seed_oss", {"head_dim": 32}),
    Row("own-head-dim", "seed_oss", {"head_dim": 64, "tie_word_embeddings": True}),
    Row("no-bias", "seed_oss", {"head_dim": 32, "attention_bias": False}),
    Row("all-biases", "seed_oss", {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True}),
)

GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 3}
TWO = {**GEMMA, "sliding_window_pattern": 2}  # every second layer sees all
ONE_FULL = ["full_attention", "sliding_attention", "sliding_attention"]


def two_ropes(local: float = 10000.0, **full: float | str) -> dict[str, Any]:
    """`rope_parameters` of Gemma 3: of layers that see all, and the base of those with a window."""
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0, **full},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return {"rope_parameters": rope}


EIGHTH = two_ropes(rope_type="linear", factor=8.0)
GEMMA3 = (
    Row("pattern", "gemma3_text", TWO),
    Row("pattern-v4", "gemma3_text", TWO, style=4),
    Row("pattern-of-six", "gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    Row("layer-types", "gemma3_text", {**GEMMA, "layer_types": ONE_FULL}),
    Row("all-slide", "gemma3_text", {**GEMMA, "layer_types": ["sliding_attention"] * 3}),
    Row("none-slide", "gemma3_text", {**GEMMA, "layer_types": ["full_attention"] * 3}),
    Row("bases", "gemma3_text", {**TWO, **two_ropes(local=100.0, rope_theta=500.0)}),
    Row("bases-v4", "gemma3_text", {**TWO, **two_ropes(local=100.0, rope_theta=500.0)}, style=4),
    Row("linear", "gemma3_text", {**TWO, **EIGHTH}),
    Row("linear-v4", "gemma3_text", {**TWO, **EIGHTH}, style=4),
    Row("yarn", "gemma3_text", {**TWO, **two_ropes(rope_type="yarn", **YARN)}),
    Row("llama3", "gemma3_text", {**TWO, **two_ropes(rope_type="llama3", **LLAMA3)}),
    Row("softcap", "gemma3_text", {**TWO, "final_logit_softcapping": 3.0}),
    # transformers ignores this one in Gemma 3, and so does hetrun.
    Row("attention-softcap", "gemma3_text", {**TWO, "attn_logit_softcapping": 2.0}),
    Row("own-head-dim", "gemma3_text", {**TWO, "head_dim": 64, "query_pre_attn_scalar": 64}),
    Row("own-scale", "gemma3_text", {**TWO, "query_pre_attn_scalar": 7}),
    Row("attention-bias", "gemma3_text", {**TWO, "attention_bias": True}),
    Row("not-tied", "gemma3_text", {**TWO, "tie_word_embeddings": False}),
    Row("bf16", "gemma3_text", TWO, dtype=torch.bfloat16),
    Row("sees", "gemma3", {**TWO, "tie_word_embeddings": True}),
    Row("sees-v4", "gemma3", {**TWO, **EIGHTH, "tie_word_embeddings": True}, style=4),
)

HALF = rope("default", partial_rotary_factor=0.5)


def longrope(columns: int = 32, original: int = 32, **settings: float) -> dict[str, Any]:
    """LongRoPE as Phi-3 has it, for heads of which `columns` columns turn."""
    short, long = ([1.0 + a * i for i in range(columns // 2)] for a in (0.1, 0.5))
    found = rope("longrope", short_factor=short, long_factor=long, **settings)
    return {"original_max_position_embeddings": original, **found}


SHORT = {**longrope(original=256), "max_position_embeddings": 1024}
PHI3 = (
    Row("plain", "phi3", {"num_key_value_heads": 4}),
    Row("gqa", "phi3"),
    Row("gqa-v4", "phi3", style=4),
    Row("tied", "phi3", {"tie_word_embeddings": True}),
    Row("own-head-dim", "phi3", {"head_dim": 64}),
    Row("window", "phi3", {"sliding_window": 8}),
    Row("window-v4", "phi3", {"sliding_window": 8}, style=4),
    Row("partial", "phi3", HALF),
    Row("partial-v4", "phi3", HALF, style=4),
    Row("longrope", "phi3", longrope()),
    Row("longrope-v4", "phi3", longrope(), style=4),
    Row("longrope-short", "phi3", SHORT, ctx=256),
    Row("longrope-short-v4", "phi3", SHORT, style=4, ctx=256),
    Row("longrope-partial", "phi3", longrope(columns=24, partial_rotary_factor=0.75)),
    Row("longrope-partial-v4", "phi3", longrope(columns=24, partial_rotary_factor=0.75), style=4),
    Row("longrope-factor", "phi3", longrope(factor=32.0)),
    Row("longrope-attention-factor", "phi3", longrope(attention_factor=1.5)),
    Row("bf16", "phi3", dtype=torch.bfloat16),
)

DELTA = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
MROPE = rope("default", partial_rotary_factor=0.5, mrope_section=[4, 2, 2], mrope_interleaved=True)
BOTH_ENDS = ["full_attention", "linear_attention", "full_attention", "linear_attention"]
QWEN35 = (
    Row("plain", "qwen3_5_text", DELTA),
    Row("tied", "qwen3_5_text", {**DELTA, "tie_word_embeddings": True}),
    Row("alike-heads", "qwen3_5_text", {**DELTA, "linear_num_value_heads": 2}),
    Row("narrow-values", "qwen3_5_text", {**DELTA, "linear_value_head_dim": 16}),
    Row("odd-keys", "qwen3_5_text", {**DELTA, "linear_key_head_dim": 24}),
    Row("kernel", "qwen3_5_text", {**DELTA, "linear_conv_kernel_dim": 3}),
    Row("layer-types", "qwen3_5_text", {**DELTA, "layer_types": BOTH_ENDS}),
    Row("sections", "qwen3_5_text", {**DELTA, **MROPE}),
    Row("bf16", "qwen3_5_text", DELTA, dtype=torch.bfloat16),
)
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SHARED_EXPERT = {
    **DELTA, **TWO_LAYERS, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}  # fmt: skip
QWEN35_MOE = (
    Row("plain", "qwen3_5_moe_text", SHARED_EXPERT),
    Row("fused", "qwen3_5_moe_text", SHARED_EXPERT, fused_experts=True),
    Row("none-shared", "qwen3_5_moe_text", {**SHARED_EXPERT, "shared_expert_intermediate_size": 0}),
    Row("bf16", "qwen3_5_moe_text", SHARED_EXPERT, dtype=torch.bfloat16),
)
QWEN3_NEXT = (
    Row("plain", "qwen3_next", SHARED_EXPERT),
    Row("not-normalised", "qwen3_next", {**SHARED_EXPERT, "norm_topk_prob": False}),
    Row("mlp-only", "qwen3_next", {**SHARED_EXPERT, "mlp_only_layers": [1]}),
    Row("fused", "qwen3_next", SHARED_EXPERT, fused_experts=True),
)

POSITIONS = {"ffn_dim": 192}
NARROW = {**POSITIONS, "word_embed_proj_dim": 64}
OPT = (
    Row("plain", "opt", POSITIONS),
    Row("plain-v4", "opt", POSITIONS, style=4),
    Row("norm-behind", "opt", {**POSITIONS, "do_layer_norm_before": False}),
    Row("narrow-words", "opt", NARROW),
    Row("as-350m", "opt", {**NARROW, "do_layer_norm_before": False}, dtype=torch.float16),
    Row("gelu", "opt", {**POSITIONS, "activation_function": "gelu"}),
    Row("gelu-tanh", "opt", {**POSITIONS, "activation_function": "gelu_new"}),
    Row("no-bias", "opt", {**POSITIONS, "enable_bias": False}),
    Row("no-affine", "opt", {**POSITIONS, "layer_norm_elementwise_affine": False}),
    Row("no-final-norm", "opt", {**POSITIONS, "_remove_final_layer_norm": True}),
    Row("not-tied", "opt", {**POSITIONS, "tie_word_embeddings": False}),
)

HYBRID = (*QWEN35, *QWEN35_MOE, *QWEN3_NEXT)
DENSE = (*LLAMA, *MISTRAL, *MINISTRAL3, *MISTRAL3, *QWEN2, *QWEN3, *QWEN3_VL)
OTHERS = (*MUSE_GLIMMER, *EXAONE4, *SMOLLM3, *SEED_OSS, *GRANITE, *ERNIE45, *GLM4, *OLMO)
SIGMOIDS = (*AFMOE, *DEEPSEEK2, *DOTS1, *GLM4_MOE, *MINIMAX_M2, *ERNIE4_5_MOE, *LFM2_MOE)
# Whose choices of experts flip with the last bits.
SENSITIVE = (*SIGMOIDS, *GRANITE_MOE, *GRANITE_HYBRID, *HUNYUAN_MOE, *GPT_OSS, *GEMMA_4)
ROWS = (
    *DENSE,
    *OTHERS,
    *MIXTRAL,
    *QWEN3_MOE,
    *QWEN3_VL_MOE,
    *GPT_OSS,
    *GEMMA_4,
    *GRANITE_MOE,
    *HUNYUAN_MOE,
    *SIGMOIDS,
    *LFM2,
    *GRANITE_HYBRID,
    *HYBRID,
    *GEMMA3,
    *PHI3,
    *OPT,
)

# Rows that say something else as soon as one of these settings is left out; three do not, and transformers
# does not run one without.
SETTINGS = ("rope_parameters", "sliding_window", "norm_topk_prob")
INERT = ("llama-dynamic", "qwen2-window-not-used-v4", "gemma3_text-none-slide", "smollm3-layer-types")
SPECIAL = tuple(r for r in ROWS if any(map(r.config.get, SETTINGS)) and str(r) not in INERT)

# One row for each architecture and each thing that only some have: what holds of llama is asked of each. The
# quick suite takes two; texts of some hundred tokens are far behind a window of 8.
QUICK = ("mixtral-window", "gemma3_text-softcap")
NAMES = {
    *QUICK,
    *("llama-all-biases", "mistral-window", "qwen2-plain", "qwen2-layer-types", "qwen3-plain"),
    *("qwen3_moe-not-normalised", "gemma3_text-pattern", "phi3-gqa", "phi3-longrope", "phi3-window"),
    *("opt-norm-behind", "opt-narrow-words", "qwen3_5_text-plain", "qwen3_5_moe_text-plain"),
    *("smollm3-plain", "seed_oss-plain", "qwen3_vl-plain", "qwen3_vl_moe-plain", "ministral3-plain"),
    *("muse_glimmer-plain", "granitemoe-plain", "granitemoeshared-shared", "dots1-plain", "afmoe-plain"),
    *("lfm2-plain", "lfm2_moe-plain", "granitemoehybrid-plain"),
    *("exaone4-plain", "exaone4-windows", "hunyuan_v1_moe-plain"),
    *("deepseek_v2-yarn", "deepseek_v3-plain", "glm4_moe_lite-plain"),
    *(
        "granite-plain",
        "gpt_oss-plain",
        "gemma4_text-plain",
        "gemma4_text-mixture",
        "glm4_moe-plain",
        "minimax_m2-plain",
        "ernie4_5_moe-plain",
    ),
    *("olmo2-plain", "olmo3-windows", "ernie4_5-plain", "glm4-plain"),
}


def parameter(row: Row, quick: Collection[str] = QUICK) -> ParameterSet:
    """A row as a test's parameter, left out of the quick suite unless it stands for many."""
    return pytest.param(row, id=str(row), marks=() if str(row) in quick else pytest.mark.slow)


def representative(rows: Iterable[Row]) -> list[ParameterSet]:
    """Rows as parameters, of which the quick suite takes one for each architecture and thing."""
    return [parameter(row, NAMES) for row in rows]


# Together these have whatever architectures differ in: for tests that take long.
FEW = (*QUICK, "qwen3-plain", "qwen3_5_text-plain", "phi3-longrope", "opt-norm-behind")
# And these whatever a file says in a way of its own, or a backend computes in one.
MANY = {
    *NAMES,
    *("llama-tied", "llama-bf16", "llama-f16", "llama-linear", "llama-llama3", "llama-yarn-betas"),
    *("llama-yarn-attention-factor", "llama-dynamic", "llama-longrope", "llama-proportional"),
    *("mistral-no-window", "mixtral-fused", "mixtral-bf16-sharded", "qwen2-tied", "qwen2-yarn", "qwen3-bf16"),
    *("qwen3_moe-sparse-step", "qwen3_moe-fused", "gemma3_text-pattern-of-six", "gemma3_text-bases"),
    *(
        "gemma3_text-linear",
        "gemma3_text-own-scale",
        "gemma3_text-attention-bias",
        "phi3-tied",
        "phi3-partial",
    ),
    *("qwen3_5_text-narrow-values", "qwen3_5_text-odd-keys", "qwen3_5_text-layer-types", "qwen3_next-plain"),
    *("qwen3_5_text-alike-heads", "qwen3_5_text-tied", "qwen3_5_moe_text-fused"),
    *("ministral3-betas", "mistral3-plain", "mistral3-mistral", "gemma3-sees"),
    *("smollm3-windows", "smollm3-some-turn", "seed_oss-all-biases"),
    *("phi3-own-head-dim", "phi3-longrope-short", "opt-plain", "opt-gelu", "opt-no-bias", "opt-no-affine"),
}
assert {str(row) for row in ROWS} >= MANY


def only(names: Collection[str], rows: Iterable[ParameterSet]) -> list[ParameterSet]:
    """Rows as parameters, all but these for `make test-all`."""
    return [
        pytest.param(*row.values, id=row.id, marks=[*row.marks, *([] if row.id in names else [exhaustive])])
        for row in rows
    ]


def crossed(
    names: Collection[str], rows: Iterable[ParameterSet], *others: Sequence[Any]
) -> list[ParameterSet]:
    """Rows, each with each of the others. Of the named ones `make test` takes, with a single list of others,
    these in turn, and with several what pairs need."""
    them = list(rows)
    named = [str(row.id) for row in them if row.id in names]
    if len(others) == 1 and others[0]:
        some = {(name, others[0][i % len(others[0])]) for i, name in enumerate(named)}
    else:
        some = set(pairwise(product(named, *others), lambda case: case))
    found = []
    for row, *rest in product(them, *others):
        case = (str(row.id), *rest)
        marks = [*row.marks, *([] if case in some else [exhaustive])]
        found.append(pytest.param(*row.values, *rest, id="-".join(map(str, case)), marks=marks))
    return found


EACH = [parameter(row) for row in ROWS if str(row) in NAMES]
assert len(EACH) == len(NAMES)
SOME = [row for row in EACH if row.id in FEW]
WINDOWED = [parameter(row) for row in ROWS if row.config.get("sliding_window") and str(row) not in INERT]
