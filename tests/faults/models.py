"""The models that operations work with: a GGUF file, a larger one that is read from disk, and a folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from safetensors.numpy import save_file

from hetrun.tools.convert.reorder import RepackOptions, repack_model
from tests.models.tiny import BOS, EOS, HF_MODULES, VOCAB, TinyLlama, draw, write_gguf

TINY = TinyLlama("tiny", layers=2, embd=64, ffn=96, heads=2, kv_heads=2, head_dim=32)
LARGER = TinyLlama("larger", layers=4, embd=512, ffn=1024, heads=8, kv_heads=4, head_dim=64, quant="Q4_0")


def make(folder: Path) -> Path:
    """Write all of them, the same every time."""
    write_gguf(TINY, folder / "tiny.gguf")
    write_gguf(LARGER, folder / "larger.gguf")
    _write_folder(replace(TINY, name="folder"), folder / "folder")
    repack_model(RepackOptions(folder / "tiny.gguf", folder / "repacked.gguf"))
    return folder


def _write_folder(model: TinyLlama, folder: Path) -> None:
    folder.mkdir()
    tensors = {_hf_name(name): values for name, values in draw(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
        "vocab_size": VOCAB, "hidden_size": model.embd, "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim, "rms_norm_eps": model.eps,
        "rope_theta": model.rope_base, "max_position_embeddings": model.context, "hidden_act": "silu",
        "bos_token_id": BOS, "eos_token_id": EOS, "tie_word_embeddings": model.tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def _hf_name(name: str) -> str:
    """A tensor's name in the layout of Hugging Face."""
    module, _, kind = name.rpartition(".")
    if module.startswith("blk."):
        _, layer, part = module.split(".")
        return f"model.layers.{layer}.{HF_MODULES[part]}.{kind}"
    return f"{HF_MODULES[module]}.{kind}"
