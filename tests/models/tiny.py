"""Tiny llama models with random weights, written as GGUF files by the tests themselves.

`TinyLlama` says what a model is, `write_gguf` writes it in the layout of GGUF, and `float_weights` gives the
values that a reader of that file must see, in the layout of Hugging Face: the two sides of every comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType, quants
from numpy.typing import NDArray

from hetrun.backend.conformance.random_weights import packed
from hetrun.graph.quant import QuantType, by_name
from tests.support.packing import unpacked_by_ggml

F32 = NDArray[np.float32]

BOS, EOS = 0, 1
SPECIAL = ("<|im_start|>", "<|im_end|>")
MERGES = (
    "Ġ t|Ġ a|i n|h e|r e|o n|Ġt he|e r|a t|Ġ s|Ġ o|e n|Ġ c|i t|i s|o r|n d|Ġ w|e s|Ġ b|in g|o u|Ġ f|Ġ p|Ġ m|"
    "a n|Ġo f|Ġa nd|a l|e d|Ġ d|Ġ h|Ġt o|l e|a r|o m|Ġ in|Ġ n|Ġ l|Ġ is|v e|r o|i c|a s|l l|i d|Ġt h|u t|e l|"
    "Ġb e|i on|e t|c h|o w|l o|Ġ on|o d|Ġ g|Ġ re|u r|Ġ y|Ġy ou"
).split("|")
VOCAB = len(SPECIAL) + 256 + len(MERGES)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Of layers and their parts, by GGUF's names.
HF_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions beyond the context of training are folded back."""

    kind: Literal["linear", "yarn", "llama3"]
    factor: float
    original_context: int = 64
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """One tiny model; widths are multiples of 32, and of 256 where a K-quant is wanted."""

    name: str
    layers: int = 2
    embd: int = 128
    ffn: int = 192
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_base: float = 10000.0
    rope: RopeScaling | None = None
    pooling: int | None = None  # llama.cpp's number
    quant: str = "F32"  # a type that the gguf package knows
    eps: float = 1e-5
    context: int = 256
    seed: int = 0

    def __str__(self) -> str:
        return self.name


def weight_shapes(model: TinyLlama) -> Iterator[tuple[str, int, int]]:
    """GGUF name, rows and columns of every matrix; vectors are not here, see `draw`."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield "token_embd.weight", VOCAB, model.embd
    for i in range(model.layers):
        yield f"blk.{i}.attn_q.weight", q, model.embd
        yield f"blk.{i}.attn_k.weight", kv, model.embd
        yield f"blk.{i}.attn_v.weight", kv, model.embd
        yield f"blk.{i}.attn_output.weight", model.embd, q
        yield f"blk.{i}.ffn_gate.weight", model.ffn, model.embd
        yield f"blk.{i}.ffn_up.weight", model.ffn, model.embd
        yield f"blk.{i}.ffn_down.weight", model.embd, model.ffn
    if not model.tied:
        yield "output.weight", VOCAB, model.embd


def draw(model: TinyLlama) -> dict[str, F32]:
    """Random weights by GGUF name, rows in Hugging Face's order, before quantisation."""
    rng = np.random.default_rng(model.seed)
    out: dict[str, F32] = {}

    def normal(*shape: int) -> F32:
        return rng.standard_normal(shape, dtype=np.float32)

    for name, rows, cols in weight_shapes(model):
        # Larger queries and keys make attention choose, so that a wrong position shows in the logits.
        gain = 1.6 if "attn_q" in name or "attn_k" in name else 2.5 if name == "output.weight" else 1.0
        out[name] = normal(rows, cols) * np.float32(gain * cols**-0.5)
        kind = name.rsplit(".", 2)[-2]
        biased = {"attn": model.attention_bias, "ffn": model.mlp_bias}
        if biased.get(kind.split("_")[0]):
            out[name.removesuffix("weight") + "bias"] = normal(rows) * np.float32(0.3)
    norms = [f"blk.{i}.{part}_norm.weight" for i in range(model.layers) for part in ("attn", "ffn")]
    for name in [*norms, "output_norm.weight"]:
        out[name] = 1 + normal(model.embd) * np.float32(0.2)
    return out


def float_weights(model: TinyLlama) -> dict[str, F32]:
    """What a reader of the file must see, by GGUF name, rows in Hugging Face's order: quantised and back."""
    quant = by_name(model.quant)
    return {name: there_and_back(w, quant) if w.ndim == 2 else w for name, w in draw(model).items()}


def there_and_back(values: F32, quant: QuantType) -> F32:
    """By the gguf package, so that hetrun's tables are not their own judge; it lacks one type."""
    raw = packed(values, quant)
    if quant.name == "Q1_0":
        return unpacked_by_ggml(raw, quant, values.shape[1])
    floats: F32 = quants.dequantize(raw, GGMLQuantizationType[quant.name])
    return floats.reshape(values.shape)


def interleave(rows: F32, heads: int) -> F32:
    """Rows of q and k in GGUF's order: the two halves of each head, which rope turns together, alternate."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def llama3_factors(scaling: RopeScaling, base: float, head_dim: int) -> F32:
    """By what llama3 divides each rope frequency, as the converters put it into rope_freqs.weight."""
    wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_context / wavelength  # full turns within the context of training
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0, 1)
    return (1 / ((1 - smooth) / scaling.factor + smooth)).astype(np.float32)


def byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte if byte in plain else 256 + others.index(byte)) for byte in range(256)]


def add_tokenizer(writer: GGUFWriter) -> None:
    """A byte-level BPE of 320 tokens: two special ones, the bytes, and some merges for English."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*SPECIAL, *byte_tokens(), *merged])
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (256 + len(merged)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_config(writer: GGUFWriter, model: TinyLlama) -> None:
    writer.add_name(model.name)
    writer.add_vocab_size(VOCAB)
    writer.add_block_count(model.layers)
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.embd)
    writer.add_feed_forward_length(model.ffn)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_layer_norm_rms_eps(model.eps)
    writer.add_rope_freq_base(model.rope_base)
    writer.add_rope_dimension_count(model.head_dim)
    if model.heads * model.head_dim != model.embd:
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
    if model.pooling is not None:
        writer.add_uint32("llama.pooling_type", model.pooling)


def add_rope_scaling(writer: GGUFWriter, model: TinyLlama) -> None:
    """As the converters write it: llama3's factors are a tensor, the other kinds are metadata."""
    scaling = model.rope
    if scaling is None:
        return
    if scaling.kind == "llama3":
        factors = llama3_factors(scaling, model.rope_base, model.head_dim)
        writer.add_tensor("rope_freqs.weight", factors)
        return
    writer.add_rope_scaling_type(RopeScalingType(scaling.kind))
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_context)
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
        if scaling.attn_factor != 1:
            writer.add_rope_scaling_attn_factors(scaling.attn_factor)


def write_gguf(model: TinyLlama, path: Path) -> Path:
    """Write the model's file and return where it is."""
    writer = GGUFWriter(path, "llama")
    add_config(writer, model)
    add_tokenizer(writer)
    add_rope_scaling(writer, model)
    for name, values in draw(model).items():
        if ".attn_q." in name or ".attn_k." in name:
            values = interleave(values, model.heads if ".attn_q." in name else model.kv_heads)
        if values.ndim == 2:
            raw = packed(values, by_name(model.quant))
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[model.quant])
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids any tiny model takes; no special ones."""
    return [int(t) for t in np.random.default_rng(seed).integers(len(SPECIAL), VOCAB, count)]
