"""Tiny models of Qwen 3 with random weights and Qwen's special tokens: as folders, and as llama.cpp converts
them, as models that write text and as rerankers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from tests.models import tiny
from tests.support.folders import lasting_folder

logging.disable_progress_bar()

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIM = {
    "fim_pre": "<|fim_prefix|>",
    "fim_suf": "<|fim_suffix|>",
    "fim_mid": "<|fim_middle|>",
    "fim_pad": "<|fim_pad|>",
    "fim_rep": "<|repo_name|>",
    "fim_sep": "<|file_sep|>",
}
MERGES = ("y e", "ye s", "n o", *tiny.MERGES)
RERANK = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
LAYERS, WIDTH, FFN, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 2, 64, 96, 4, 2, 32, 4096
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Qwen:
    """One model: `fim` says how its tokens to fill in the middle are called in a GGUF file."""

    name: str
    tied: bool = True
    fim: str = "new"  # or "old", "text": by no key; "none": there are no such tokens

    @property
    def words(self) -> list[str]:
        """The vocabulary."""
        fim = () if self.fim == "none" else FIM.values()
        return [*SPECIAL, *fim, *tiny.byte_tokens(), *(m.replace(" ", "") for m in MERGES)]

    @property
    def n_special(self) -> int:
        """How many of these are special; they come first."""
        return len(SPECIAL) + (0 if self.fim == "none" else len(FIM))

    def token(self, word: str) -> int:
        """The number of a token."""
        return self.words.index(word)


@cache
def torch_model(qwen: Qwen) -> Qwen3ForCausalLM:
    """The model of transformers; judgements differ from text to text, because rows of its ends are large."""
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=len(qwen.words),
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=qwen.tied,
        bos_token_id=0,
        eos_token_id=2,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                gain = 1.6 if "q_proj" in name or "k_proj" in name else 1.0
                weight.normal_(0, gain * weight.shape[1] ** -0.5)
    return model


@cache
def folder(qwen: Qwen) -> Path:
    """The model as Hugging Face has it."""
    path = lasting_folder() / qwen.name
    torch_model(qwen).save_pretrained(path)
    merges = [(a, b) for a, b in (m.split(" ") for m in MERGES)]
    out = Tokenizer(models.BPE({word: i for i, word in enumerate(qwen.words)}, merges))
    out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    out.decoder = decoders.ByteLevel()
    out.add_special_tokens(qwen.words[: qwen.n_special])
    out.save(str(path / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "add_bos_token": False}
    (path / "tokenizer_config.json").write_text(json.dumps(said | {"chat_template": tiny.CHAT_TEMPLATE}))
    return path


def written(
    qwen: Qwen, path: Path, *, head: bool = False, rows: int = 2, pooling: int | None = None,
    template: str | None = None, name: str = "tiny",
) -> Path:  # fmt: skip
    """The model as a GGUF file; `head`: with a matrix of its own for yes and no."""
    writer = GGUFWriter(path, "qwen3")
    writer.add_name(name)
    for key, value in {
        "block_count": LAYERS, "context_length": CONTEXT, "embedding_length": WIDTH,
        "feed_forward_length": FFN, "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM,
    }.items():  # fmt: skip
        writer.add_uint32(f"qwen3.{key}", value)
    writer.add_float32("qwen3.rope.freq_base", 10000.0)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    if pooling is not None:
        writer.add_uint32("qwen3.pooling_type", pooling)
    _add_tokenizer(writer, qwen, template)
    for name, tensor in _tensors(qwen, rows if head else 0).items():
        writer.add_tensor(name, tensor)
    if head:
        writer.add_array("qwen3.classifier.output_labels", ["yes", "no"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, qwen: Qwen, template: str | None) -> None:
    words, n = qwen.words, qwen.n_special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([TokenType.CONTROL] * n + [TokenType.NORMAL] * (len(words) - n))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template([{"name": "rerank", "template": template}])
    else:
        writer.add_chat_template(tiny.CHAT_TEMPLATE)
    old = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
    names = {"new": {kind: kind for kind in FIM}, "old": old}.get(qwen.fim, {})
    for kind, name in names.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", qwen.token(FIM[kind]))


def _tensors(qwen: Qwen, rows: int) -> Mapping[str, np.ndarray]:
    """By GGUF name; `rows` of a matrix for yes and no."""
    found: dict[str, np.ndarray] = {}
    for name, weight in torch_model(qwen).state_dict().items():
        values = weight.numpy().astype(np.float32)
        plain = name.removeprefix("model.").removesuffix(".weight")
        if plain.startswith("layers."):
            _, layer, part = plain.split(".", 2)
            found[f"blk.{layer}.{NAMES[part]}.weight"] = values
        elif plain != "lm_head" or not qwen.tied:
            ours = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[plain]
            found[f"{ours}.weight"] = values
    if rows:
        ends = found["token_embd.weight" if qwen.tied else "output.weight"]
        yes, no = ends[qwen.token("yes")], ends[qwen.token("no")]
        found["cls.output.weight"] = np.stack([yes, no]) if rows == 2 else (yes - no)[None]
        if not qwen.tied:  # the converter leaves out what no judgement needs
            del found["output.weight"]
    return found
