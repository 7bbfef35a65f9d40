"""The tiny models every architecture is tested with: one row for each thing a model can have of its own."""

from __future__ import annotations

from dataclasses import replace

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
QUANTISED = (
    replace(WIDE, name="f16", quant="F16"),
    replace(WIDE, name="bf16", quant="BF16"),
    replace(WIDE, name="q8_0", quant="Q8_0"),
    replace(WIDE, name="q4_0", quant="Q4_0"),
    replace(WIDE, name="q4_1", quant="Q4_1"),
    replace(WIDE, name="q4_k", quant="Q4_K"),
    replace(WIDE, name="q5_k", quant="Q5_K"),
    replace(WIDE, name="q6_k", quant="Q6_K"),
)
