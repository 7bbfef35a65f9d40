"""The oracle: the same tiny model in Hugging Face's transformers, in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.tiny import F32, HF_MODULES, VOCAB, RopeScaling, TinyLlama, float_weights

torch.set_num_threads(1)  # the models are so tiny that more would mostly wait for each other


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    *block, part, kind = name.split(".")
    layer = f"model.layers.{block[1]}." if block else ""
    return f"{layer}{HF_MODULES[part]}.{kind}"


def rope_parameters(scaling: RopeScaling | None, base: float) -> dict[str, Any]:
    """transformers' words for a rope scaling."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": base}
    out = {"rope_type": scaling.kind, "rope_theta": base, "factor": scaling.factor}
    if scaling.kind != "linear":
        out["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        out |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        # GGUF's factor multiplies the paper's own; transformers' replaces it.
        paper = 0.1 * math.log(scaling.factor) + 1
        out |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        out["attention_factor"] = paper * scaling.attn_factor
    return out


def hf_config(model: TinyLlama) -> LlamaConfig:
    """The same settings as in the GGUF file."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=model.embd,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.context,
        rms_norm_eps=model.eps,
        tie_word_embeddings=model.tied,
        attention_bias=model.attention_bias,
        mlp_bias=model.mlp_bias,
        rope_parameters=rope_parameters(model.rope, model.rope_base),
    )


def hf_model(model: TinyLlama) -> LlamaForCausalLM:
    """The same weights as a reader of the GGUF file sees, in float32."""
    state = {hf_name(name): torch.from_numpy(values) for name, values in float_weights(model).items()}
    if model.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    out: LlamaForCausalLM = LlamaForCausalLM(hf_config(model))
    out.load_state_dict(state)
    return out


def logits(model: TinyLlama, tokens: Sequence[int]) -> F32:
    """[tokens, vocabulary]"""
    with torch.inference_mode():
        return np.asarray(hf_model(model)(torch.tensor([list(tokens)])).logits[0].numpy(), dtype=np.float32)
