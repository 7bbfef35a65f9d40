"""config.json and tensors as real models have them: every key that was published, sizes aside."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hetrun import LLM
from hetrun.tools.evaluate import compare
from tests.models import hf, tiny
from tests.models.hf import Row
from tests.support.tiers import exhaustive

TOKENS = tiny.random_tokens(60)
ALL = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "use_cache": True}
LLAMA = {**ALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
         "pretraining_tp": 1, "rms_norm_eps": 1e-05}  # fmt: skip
QWEN = {**ALL, "hidden_act": "silu", "attention_dropout": 0.0, "rms_norm_eps": 1e-06,
        "use_sliding_window": False, "max_window_layers": 1, "rope_theta": 1000000.0}  # fmt: skip
PHI = {**ALL, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
       "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_act": "silu",
       "rms_norm_eps": 1e-05, "max_position_embeddings": 1024, "original_max_position_embeddings": 32,
       "sliding_window": 262144}  # fmt: skip
OPT = {**ALL, "model_type": "opt", "architectures": ["OPTForCausalLM"], "prefix": "</s>", "dropout": 0.1,
       "layerdrop": 0.0, "attention_dropout": 0.0, "init_std": 0.02, "ffn_dim": 192}  # fmt: skip
MODELS: Mapping[str, dict[str, Any]] = {
    "Llama-2-7b": {**LLAMA, "max_position_embeddings": 4096, "rope_scaling": None,
        "tie_word_embeddings": False, "num_key_value_heads": 4},
    "Llama-3.2-1B": {**LLAMA, "eos_token_id": [2, 3, 4], "attention_bias": False, "mlp_bias": False,
        "head_dim": 32, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
            "original_max_position_embeddings": 32}, "tie_word_embeddings": True},
    "SmolLM2": {**LLAMA, "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "max_position_embeddings": 8192,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    "Mistral-Nemo": {**ALL, "model_type": "mistral", "attention_dropout": 0.0, "head_dim": 40,
        "hidden_act": "silu", "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "max_position_embeddings": 131072, "tie_word_embeddings": False},
    "Mixtral-8x7B": {**ALL, "model_type": "mixtral", "attention_dropout": 0.0, "hidden_act": "silu",
        "num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False},
    "Qwen2.5-0.5B": {**QWEN, "model_type": "qwen2", "use_mrope": False, "sliding_window": 16,
        "tie_word_embeddings": True, "max_position_embeddings": 32768},
    "Qwen3-8B-yarn": {**QWEN, "model_type": "qwen3", "attention_bias": False, "head_dim": 32,
        "max_position_embeddings": 40960, "sliding_window": None, "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "Qwen3-30B-A3B": {**QWEN, "model_type": "qwen3_moe", "attention_bias": False, "head_dim": 32,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 64, "num_experts": 16,
        "norm_topk_prob": True, "num_experts_per_tok": 4, "rope_scaling": None, "sliding_window": None},
    "gemma-3-1b-it": {**ALL, "model_type": "gemma3_text", "attn_logit_softcapping": None,
        "cache_implementation": "hybrid", "eos_token_id": [1, 3], "final_logit_softcapping": None,
        "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": 16, "sliding_window_pattern": 2,
        "num_key_value_heads": 1},
    "Phi-3-mini-128k": {**PHI, "num_key_value_heads": 4, "rope_theta": 10000.0, "rope_scaling": {
        "long_factor": [1.0 + 0.4 * i for i in range(16)], "type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(16)]}, "tie_word_embeddings": False},
    "Phi-4-mini": {**PHI, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
        "mlp_bias": False, "partial_rotary_factor": 0.75, "rope_theta": 10000.0, "rope_scaling": {
            "long_factor": [1.0 + 0.4 * i for i in range(12)], "type": "longrope",
            "short_factor": [1] * 12}, "tie_word_embeddings": True},
    "opt-350m": {**OPT, "activation_function": "relu", "do_layer_norm_before": False,
        "word_embed_proj_dim": 64},
    "galactica": {**OPT, "activation_function": "gelu", "_remove_final_layer_norm": False,
        "enable_bias": False, "layer_norm_elementwise_affine": False},
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def write(path: Path, name: str, change: Callable[[Tensors], Tensors] = dict) -> Path:
    """The model with exactly that config.json, and with these changes to its tensors."""
    config = {k: v for k, v in MODELS[name].items() if k != "model_type"}
    row = Row(name, MODELS[name]["model_type"], config)
    hf.random_model(row).save_pretrained(path, save_original_format=True)
    (path / "config.json").write_text(json.dumps({**hf.SIZES, **MODELS[name], "torch_dtype": "float32"}))
    file = path / "model.safetensors"
    tensors = {k: v.clone() for k, v in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    hf.write_tokenizer(path)
    return path


def check(path: Path) -> None:
    """hetrun and transformers read the same model from the folder."""
    expected = hf.logits(path, TOKENS)
    with LLM(path, backends=["reference"], kv_type="f32") as llm:
        ours = llm.logits(TOKENS)
    assert np.abs(ours - expected).max() < 1e-3
    with LLM(path, backends=["llamacpp"], kv_type="f32") as llm:
        assert compare([expected], [llm.logits(TOKENS)]).mean_kl < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_published_settings(name: str, tmp_path: Path) -> None:
    check(write(tmp_path, name))


def without_head(tensors: Tensors) -> Tensors:
    """As the model inside saves itself."""
    return {k.removeprefix("model."): v for k, v in tensors.items()}


def with_rope_tables(tensors: Tensors) -> Tensors:
    """As the first llamas have them."""
    rotary = "model.layers.0.self_attn.rotary_emb."
    tables = {f"{rotary}{name}_cached": torch.ones(1, 1, 64, 32) for name in ("cos", "sin")}
    return {**tensors, **tables, f"{rotary}inv_freq": torch.ones(16)}


def with_words(tensors: Tensors, gain: float) -> Tensors:
    """The head beside the table of words: the same, or another."""
    table = next(k for k in tensors if k.endswith("embed_tokens.weight"))
    return {**tensors, "lm_head.weight": tensors[table] * gain}


CHANGES: Mapping[str, Callable[[Tensors], Tensors]] = {
    "without-head": without_head,
    "rope-tables": with_rope_tables,
    "tied-twice": lambda tensors: with_words(tensors, 1.0),
    "not-tied": lambda tensors: with_words(tensors, 1.5),
    # As mixed checkpoints have it; what is fused must not be stacked across types.
    "norms-f32": lambda tensors: {k: v if "norm" in k else v.half() for k, v in tensors.items()},
    "every-other-f16": lambda tensors: {
        k: tensors[k].half() if i % 2 else tensors[k] for i, k in enumerate(sorted(tensors))
    },
}


# What changes of Phi-4 and OPT is read in a way of its own: fused products, and a table under another name.
TOLD = [
    *(("SmolLM2", change) for change in CHANGES),
    *(("Phi-4-mini", change) for change in ("without-head", "norms-f32", "every-other-f16")),
    *(("opt-350m", change) for change in ("without-head", "not-tied")),
]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *TOLD,
        *(
            pytest.param(*case, marks=exhaustive)
            for case in product(("Phi-4-mini", "opt-350m"), CHANGES)
            if case not in TOLD
        ),
    ],
)
def test_published_tensors(name: str, change: str, tmp_path: Path) -> None:
    check(write(tmp_path, name, CHANGES[change]))
