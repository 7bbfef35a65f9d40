"""The tiny models that tests make with transformers: one row for each thing a model can have of its own.

Rows of one family that differ in a setting only have the same weights.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.models.hf import Row


def rope(kind: str, **settings: float | str | bool | list[float]) -> dict[str, Any]:
    """`rope_parameters` of one kind."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
BETAS = {"beta_fast": 4.0, "beta_slow": 0.5}
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64
}  # fmt: skip
LONGROPE = {
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

ROWS = (*LLAMA, *MISTRAL, *MIXTRAL, *QWEN2, *QWEN3, *QWEN3_MOE)

# Rows that say something else as soon as one of these settings is left out, and the two that do not.
SETTINGS = ("rope_parameters", "sliding_window", "norm_topk_prob")
INERT = ("llama-dynamic", "qwen2-window-not-used-v4")
SPECIAL = tuple(r for r in ROWS if any(map(r.config.get, SETTINGS)) and str(r) not in INERT)
