"""The tiny models every architecture is tested with: one row for each thing a model can have of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.models.tiny import RopeScaling, TinyLlama

GQA = TinyLlama("gqa", kv_heads=2)
WIDE = TinyLlama("wide", embd=256, ffn=512, kv_heads=2, head_dim=64)

LLAMA = (
    TinyLlama("mha", layers=3),
    GQA,
    TinyLlama("mqa", kv_heads=1),
    TinyLlama("tied", tied=True),
    TinyLlama("own-head-dim", kv_heads=2, head_dim=64),
    TinyLlama("attention-bias", kv_heads=2, attention_bias=True),
    TinyLlama("all-biases", kv_heads=2, attention_bias=True, mlp_bias=True),
    replace(GQA, name="llama3-rope", rope_base=500000.0, rope=RopeScaling("llama3", 8.0)),
    replace(GQA, name="linear-rope", rope=RopeScaling("linear", 4.0)),
    replace(GQA, name="yarn-rope", rope=RopeScaling("yarn", 4.0)),
    replace(GQA, name="yarn-rope-attn-factor", rope=RopeScaling("yarn", 4.0, attn_factor=0.7)),
    replace(GQA, name="yarn-rope-betas", rope=RopeScaling("yarn", 4.0, beta_fast=4.0, beta_slow=0.5)),
)

# The same model in every type; K-quants have blocks of 256.
_TYPES = (
    *("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "Q2_K", "Q3_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"),
    *("IQ3_S", "TQ1_0", "TQ2_0", "Q1_0"),
)
QUANTISED = tuple(replace(WIDE, name=quant.lower(), quant=quant) for quant in _TYPES)
COMMON = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4")
EACH_TYPE = [
    pytest.param(c, id=str(c), marks=() if c.quant in COMMON else pytest.mark.slow) for c in QUANTISED
]
COMMON_TYPES = [str(c) for c in QUANTISED if c.quant in COMMON]
