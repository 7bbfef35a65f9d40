"""The harness: tiny random models of Hugging Face's own code, saved as people publish them, and their logits.

A `Row` says what a model is; `folder` writes it (once), `logits` asks transformers, reading that same folder.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

from tests.models import tiny
from tests.models.tiny import F32
from tests.support.folders import files_folder

logging.disable_progress_bar()
torch.set_num_threads(1)  # the models are so tiny that more would mostly wait for each other

SIZES = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": tiny.BOS,
    "eos_token_id": tiny.EOS,
    "pad_token_id": None,
}
# Larger queries and keys make attention choose, so that a wrong position shows in the logits; a larger
# router makes experts differ.
GAINS = {
    "q_proj": 1.6,
    "k_proj": 1.6,
    "qkv_proj": 1.6,
    "lm_head": 2.5,
    "gate.weight": 3.0,
    "router.weight": 3.0,
    "router.proj.weight": 30.0,
}


BY_SIGMOID = ("glm4_moe", "minimax_m2")
# What sees pictures in models that do: as small as it can be, and no test looks through it.
VISION: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "patch_size": 4,
        "out_hidden_size": SIZES["hidden_size"], "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
    "qwen3_vl_moe": {
        "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "patch_size": 4,
        "out_hidden_size": SIZES["hidden_size"], "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
    "gemma3": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
        "image_size": 16, "patch_size": 4,
    },
    "muse_glimmer": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
        "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16,
    },
    "mistral3": {
        "model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "image_size": 16, "patch_size": 4,
    },
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Row:
    """One model: what its config says besides SIZES, and how it is saved."""

    name: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    style: Literal[4, 5] = 5  # which transformers wrote config.json
    dtype: torch.dtype = torch.float32
    shard: str | None = None  # the largest size of a file
    fused_experts: bool = False  # as transformers 5 holds them in memory
    seed: int = 0
    ctx: int | None = None  # what hetrun is asked for; None: all that the model was trained for

    def __str__(self) -> str:
        return f"{self.model_type}-{self.name}"


@cache
def folder(row: Row) -> Path:
    """The model as a folder, written once for all tests."""
    # llama.cpp asks for certain tokens in models whose name, which is the folder's, has phi3 in it.
    path = files_folder() / str(row).replace("phi3", "phi")
    model = random_model(row)
    model.save_pretrained(path, max_shard_size=row.shard or "1GB", save_original_format=not row.fused_experts)
    assert row.shard is None or len(list(path.glob("*.safetensors"))) > 1
    if row.style == 4:
        file = path / "config.json"
        said = json.loads(file.read_text())
        if "text_config" in said:
            said["text_config"] = as_transformers_4(said["text_config"])
        else:
            said = as_transformers_4(said)
        file.write_text(json.dumps(said, indent=2))
    leave_empty_out(path)
    write_tokenizer(path)
    return path


def leave_empty_out(path: Path) -> None:
    """An expert of no width: no model that is published has its tensors."""
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if any(not t.numel() for t in tensors.values()):
            kept = {name: t for name, t in tensors.items() if t.numel() and ".shared_expert" not in name}
            save_file(kept, file, metadata={"format": "pt"})


def random_model(row: Row) -> PreTrainedModel:
    """The model with random weights of which everything matters: biases, norms, positions."""
    said = {**SIZES, **row.config}
    if vision := VISION.get(row.model_type):
        tied = said.get("tie_word_embeddings", False)
        said = {"text_config": said, "vision_config": vision, "tie_word_embeddings": tied}
        if row.model_type == "gemma3":
            said["mm_tokens_per_image"] = 4
        if row.model_type == "muse_glimmer":
            said |= {"out_hidden_size": 4 * vision["hidden_size"], "projector_hidden_size": 32}
    config = AutoConfig.for_model(row.model_type, **said)
    with experts_of_no_width(), torch.random.fork_rng():
        torch.manual_seed(row.seed)  # what transformers draws itself and is only added to below: sinks
        model: PreTrainedModel = kind_of(row.model_type).from_config(config)
    random = torch.Generator().manual_seed(row.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=random)
            if weight.ndim >= 2:
                gain = next((g for part, g in GAINS.items() if part in name), 1.0)
                if row.model_type in BY_SIGMOID and name.endswith(".mlp.gate.weight"):
                    gain = 0.5  # or all experts that are liked at all would be liked alike
                weight.copy_(noise * gain * max(1, weight.shape[-1]) ** -0.5)
            elif name.endswith("A_log"):
                weight.copy_(noise * 0.5 - 1)  # states that fade over some tokens, not over one
            elif name.endswith("bias"):
                weight.copy_(noise * 0.3)
            else:
                weight.add_(noise * 0.2)  # a norm's gain: 1, or 0 where the code adds the 1
            if row.model_type.startswith("gemma4") and name.endswith("q_norm.weight"):
                weight.mul_(0.2)  # nothing else divides scores there
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.6)
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=random) * 0.2)
    torch.nn.Module.to(model, row.dtype)
    return model


def kind_of(model_type: str) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """What of transformers' opens such a model."""
    found: type[AutoModelForCausalLM | AutoModelForImageTextToText] = AutoModelForCausalLM
    if model_type in VISION:
        found = AutoModelForImageTextToText
    return found


def as_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """The same settings in the words of transformers 4."""
    out = {k: v for k, v in config.items() if k not in ("rope_parameters", "layer_types", "dtype")}
    out |= {"torch_dtype": config.get("dtype", "float32"), "transformers_version": "4.51.3"}
    rope = config.get("rope_parameters")
    if rope is None:
        return out
    local = rope.get("sliding_attention")
    if local is not None:
        out["rope_local_base_freq"] = local["rope_theta"]
    rope = dict(rope.get("full_attention", rope))
    out["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        out["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    out["rope_scaling"] = rope if rope["rope_type"] != "default" or "mrope_section" in rope else None
    return out


def write_tokenizer(path: Path) -> None:
    """The byte-level BPE of the GGUF files in `tiny`, with its template."""
    words = [*tiny.SPECIAL, *tiny.byte_tokens(), *(m.replace(" ", "") for m in tiny.MERGES)]
    merges = [(a, b) for a, b in (m.split(" ") for m in tiny.MERGES)]
    out = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    out.decoder = decoders.ByteLevel()
    out.add_special_tokens(list(tiny.SPECIAL))
    out.save(str(path / "tokenizer.json"))
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tiny.SPECIAL[tiny.BOS],
        "eos_token": tiny.SPECIAL[tiny.EOS],
        "add_bos_token": False,
        "chat_template": tiny.CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(said, indent=2))


@contextmanager
def experts_of_no_width() -> Iterator[None]:
    """torch warns of each tensor that it has nothing to fill with."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        yield


@cache
def _loaded(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with experts_of_no_width():
        kind = kind_of(json.loads((path / "config.json").read_text())["model_type"])
        out: PreTrainedModel = kind.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return out


def logits(path: Path, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> F32:
    """[tokens, vocabulary], by transformers from the folder, computed in float32 or another type."""
    with torch.inference_mode():
        out = _loaded(path, dtype)(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return np.asarray(out.float().numpy(), dtype=np.float32)


def hidden(path: Path, tokens: Sequence[int]) -> F32:
    """[tokens, width]: what transformers calls the last hidden state, in float32."""
    with torch.inference_mode():
        out = _loaded(path).base_model(torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0]
    return np.asarray(out.numpy(), dtype=np.float32)
