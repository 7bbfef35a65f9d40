"""Tiny models that see: for each family a text model and its vision tower (mmproj), with random weights that
are the same every time. hetrun and llama.cpp both run them.

A patch is 4 pixels wide, so that small pictures have many; the vocabulary has the marks of all families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray

from tests.models import tiny

F32 = NDArray[np.float32]

LAYERS, WIDTH, FFN, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 4, 64, 96, 4, 2, 32, 4096
SEEN_LAYERS, SEEN_WIDTH, SEEN_FFN, SEEN_HEADS, PATCH = 3, 64, 96, 4, 4
DEEPSTACK = 2  # layers of the tower, from the second on, whose rows the text's first layers get
MARKS = (
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<start_of_image>", "<end_of_image>", "<|image>", "<image|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
)
SPECIAL = (*tiny.SPECIAL, *MARKS)
VOCAB = len(SPECIAL) + 256 + len(tiny.MERGES)


class Seeing(NamedTuple):
    """A model and its tower."""

    text: Path
    mmproj: Path


@dataclass(frozen=True)
class Weight:
    """A tensor to be made: normal numbers of this deviation around this mean."""

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    half: bool = False  # as 16-bit numbers


def matrix(rows: int, cols: int, gain: float = 1.0) -> Weight:
    return Weight((rows, cols), gain * cols**-0.5, half=True)


def norm(width: int, mean: float = 1.0) -> Weight:
    return Weight((width,), 0.1, mean)


def bias(width: int) -> Weight:
    return Weight((width,), 0.1)


Tensors = Iterator[tuple[str, Weight]]


def made(path: Path, writer: GGUFWriter, tensors: Tensors, seed: int) -> Path:
    """Write a file."""
    rng = np.random.default_rng(seed)
    for name, w in tensors:
        values = rng.standard_normal(w.shape, dtype=np.float32) * np.float32(w.std) + np.float32(w.mean)
        writer.add_tensor(name, values.astype(np.float16) if w.half else values)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- texts


def attention(i: int, heads: int = HEADS, dim: int = HEAD_DIM, gate: int = 1) -> Tensors:
    blk = f"blk.{i}."
    yield blk + "attn_q.weight", matrix(gate * heads * dim, WIDTH, 1.6)
    yield blk + "attn_k.weight", matrix(KV_HEADS * dim, WIDTH, 1.6)
    yield blk + "attn_v.weight", matrix(KV_HEADS * dim, WIDTH)
    yield blk + "attn_output.weight", matrix(WIDTH, heads * dim)


def head_norms(i: int, dim: int = HEAD_DIM, mean: float = 1.0) -> Tensors:
    yield f"blk.{i}.attn_q_norm.weight", norm(dim, mean)
    yield f"blk.{i}.attn_k_norm.weight", norm(dim)


def ffn(i: int) -> Tensors:
    blk = f"blk.{i}."
    yield blk + "ffn_gate.weight", matrix(FFN, WIDTH)
    yield blk + "ffn_up.weight", matrix(FFN, WIDTH)
    yield blk + "ffn_down.weight", matrix(WIDTH, FFN)


def norms(i: int, *names: str) -> Tensors:
    for name in names:
        yield f"blk.{i}.{name}.weight", norm(WIDTH)


def ends() -> Tensors:
    yield "token_embd.weight", Weight((VOCAB, WIDTH), 0.125, half=True)
    yield "output_norm.weight", norm(WIDTH)


def qwen3vl_text() -> Tensors:
    yield from ends()
    for i in range(LAYERS):
        yield from norms(i, "attn_norm", "ffn_norm")
        yield from attention(i)
        yield from head_norms(i)
        yield from ffn(i)


def mistral3_text() -> Tensors:
    yield from ends()
    for i in range(LAYERS):
        yield from norms(i, "attn_norm", "ffn_norm")
        yield from attention(i)
        yield from ffn(i)


def gemma3_text() -> Tensors:
    yield from ends()
    for i in range(LAYERS):
        yield from norms(i, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        yield from attention(i)
        yield from head_norms(i)
        yield from ffn(i)


GEMMA4_OWN = 16  # columns of each layer's own embeddings
GEMMA4_FULL = 64  # columns of a head where all is seen


def is_full(layer: int) -> bool:
    """Whether a layer of Gemma's sees all tokens."""
    return layer % 2 == 1


def gemma4_text() -> Tensors:
    """Without each layer's own embeddings, as the larger models are."""
    yield from ends()
    yield "rope_freqs.weight", Weight((GEMMA4_FULL // 2,), 0.0, 1.0)
    for i in range(LAYERS):
        dim = GEMMA4_FULL if is_full(i) else HEAD_DIM
        yield from norms(i, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        yield from attention(i, dim=dim)
        # Nothing else divides scores.
        yield from head_norms(i, dim, dim**-0.5)
        yield from ffn(i)
        yield f"blk.{i}.layer_output_scale.weight", Weight((1,), 0.0, 1.0)


K_HEADS, V_HEADS, STATE, TAPS = 2, 4, 32, 4  # of delta nets
INTERVAL = 2  # every second layer has attention


def qwen35_text() -> Tensors:
    keys, values = K_HEADS * STATE, V_HEADS * STATE
    yield from ends()
    for i in range(LAYERS):
        blk = f"blk.{i}."
        yield from norms(i, "attn_norm", "post_attention_norm")
        yield from ffn(i)
        if (i + 1) % INTERVAL == 0:
            yield from attention(i, gate=2)
            yield from head_norms(i)
            continue
        yield blk + "attn_qkv.weight", matrix(2 * keys + values, WIDTH)
        yield blk + "attn_gate.weight", matrix(values, WIDTH)
        yield blk + "ssm_alpha.weight", matrix(V_HEADS, WIDTH)
        yield blk + "ssm_beta.weight", matrix(V_HEADS, WIDTH)
        yield blk + "ssm_conv1d.weight", Weight((2 * keys + values, TAPS), TAPS**-0.5)
        yield blk + "ssm_a", Weight((V_HEADS,), 0.02, -0.1)
        yield blk + "ssm_dt.bias", Weight((V_HEADS,), 1.0, -2.0)
        yield blk + "ssm_norm.weight", norm(STATE)
        yield blk + "ssm_out.weight", matrix(WIDTH, values)


SECTIONS = [6, 5, 5, 0]
SETTINGS: dict[str, dict[str, object]] = {
    "qwen3vl": {"rope.dimension_sections": SECTIONS, "n_deepstack_layers": DEEPSTACK},
    "qwen3vl-flat": {"rope.dimension_sections": SECTIONS, "n_deepstack_layers": 0},
    "qwen35": {
        "rope.dimension_sections": [3, 3, 2, 0],
        "rope.dimension_count": HEAD_DIM // 2,
        "ssm.conv_kernel": TAPS,
        "ssm.state_size": STATE,
        "ssm.group_count": K_HEADS,
        "ssm.time_step_rank": V_HEADS,
        "ssm.inner_size": V_HEADS * STATE,
        "full_attention_interval": INTERVAL,
    },
    "gemma3": {"attention.sliding_window": 64, "attention.sliding_window_pattern": 2},
    "gemma4": {
        "attention.sliding_window": 64,
        "attention.sliding_window_pattern": [not is_full(i) for i in range(LAYERS)],
        "attention.key_length_swa": HEAD_DIM,
        "attention.value_length_swa": HEAD_DIM,
        "attention.shared_kv_layers": 0,
        "attention.key_length": GEMMA4_FULL,
        "attention.value_length": GEMMA4_FULL,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "rope.freq_base_swa": 10000.0,
        "rope.dimension_count_swa": HEAD_DIM,
        "rope.dimension_count": GEMMA4_FULL,
    },
    "mistral3": {},
}
TEXTS: dict[str, Callable[[], Tensors]] = {
    "qwen3vl": qwen3vl_text,
    "qwen3vl-flat": qwen3vl_text,
    "qwen35": qwen35_text,
    "gemma3": gemma3_text,
    "gemma4": gemma4_text,
    "mistral3": mistral3_text,
}


def add_numbers(writer: GGUFWriter, prefix: str, numbers: Mapping[str, object]) -> None:
    for name, value in numbers.items():
        key = f"{prefix}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            assert isinstance(value, list)
            writer.add_array(key, value)


def write_text(family: str, path: Path, seed: int = 1) -> Path:
    """The text model of a family."""
    family = "gemma4" if family == UNIFIED else family
    architecture = family.removesuffix("-flat")
    writer = GGUFWriter(None, architecture)
    writer.add_name(f"tiny-{family}")
    common = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": HEAD_DIM,
        "vocab_size": VOCAB,
    }
    add_numbers(writer, architecture, common | SETTINGS[family])
    _add_tokenizer(writer)
    return made(path, writer, TEXTS[family](), seed)


def _add_tokenizer(writer: GGUFWriter) -> None:
    words = [*SPECIAL, *tiny.byte_tokens(), *(m.replace(" ", "") for m in tiny.MERGES)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    plain = len(words) - len(SPECIAL)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * plain)
    writer.add_token_merges(tiny.MERGES)
    writer.add_bos_token_id(tiny.BOS)
    writer.add_eos_token_id(tiny.EOS)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


# Content is a text, or a list of parts, as such models' templates have it.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# --- towers


def seen_layers(*, biases: bool, gate: bool, fused: bool = False, after: bool = False) -> Tensors:
    """The layers of a tower."""
    n = SEEN_WIDTH
    for i in range(SEEN_LAYERS):
        blk = f"v.blk.{i}."
        named = (
            {"attn_q": (n, n), "attn_k": (n, n), "attn_v": (n, n)} if not fused else {"attn_qkv": (3 * n, n)}
        )
        named |= {"attn_out": (n, n), "ffn_up": (SEEN_FFN, n), "ffn_down": (n, SEEN_FFN)}
        named |= {"ffn_gate": (SEEN_FFN, n)} if gate else {}
        for name, (rows, cols) in named.items():
            yield f"{blk}{name}.weight", matrix(rows, cols, 1.6 if name in ("attn_q", "attn_k") else 1.0)
            if biases:
                yield f"{blk}{name}.bias", bias(rows)
        for name in ("ln1", "ln2", *(("attn_post_norm", "ffn_post_norm") if after else ())):
            yield f"{blk}{name}.weight", norm(n)
            if biases:
                yield f"{blk}{name}.bias", bias(n)


def patches(name: str = "v.patch_embd.weight") -> tuple[str, Weight]:
    return name, Weight((SEEN_WIDTH, 3, PATCH, PATCH), (3 * PATCH * PATCH) ** -0.5)


def qwen_tower(deepstack: int) -> Tensors:
    yield patches()
    yield patches("v.patch_embd.weight.1")
    yield "v.patch_embd.bias", bias(SEEN_WIDTH)
    yield "v.position_embd.weight", Weight((SIDE * SIDE, SEEN_WIDTH), 0.3)
    yield from seen_layers(biases=True, gate=False, fused=True)
    yield "v.post_ln.weight", norm(SEEN_WIDTH)
    yield "v.post_ln.bias", bias(SEEN_WIDTH)
    four = 4 * SEEN_WIDTH
    yield "mm.0.weight", matrix(four, four)
    yield "mm.0.bias", bias(four)
    yield "mm.2.weight", matrix(WIDTH, four)
    yield "mm.2.bias", bias(WIDTH)
    for i in range(deepstack):
        at = f"v.deepstack.{i + 1}."
        yield at + "norm.weight", norm(four)
        yield at + "norm.bias", bias(four)
        yield at + "fc1.weight", matrix(four, four)
        yield at + "fc1.bias", bias(four)
        yield at + "fc2.weight", matrix(WIDTH, four)
        yield at + "fc2.bias", bias(WIDTH)


def gemma3_tower() -> Tensors:
    yield patches()
    yield "v.patch_embd.bias", bias(SEEN_WIDTH)
    yield "v.position_embd.weight", Weight((SIDE * SIDE, SEEN_WIDTH), 0.3)
    yield from seen_layers(biases=True, gate=False)
    yield "v.post_ln.weight", norm(SEEN_WIDTH)
    yield "v.post_ln.bias", bias(SEEN_WIDTH)
    yield "mm.input_projection.weight", matrix(SEEN_WIDTH, WIDTH)
    yield "mm.soft_emb_norm.weight", norm(SEEN_WIDTH)


def gemma4_tower() -> Tensors:
    yield patches()
    # As many places as the longest side of the largest picture has patches.
    yield "v.position_embd.weight", Weight((2, 3400, SEEN_WIDTH), 0.3)
    yield from seen_layers(biases=False, gate=True, after=True)
    for i in range(SEEN_LAYERS):
        yield f"v.blk.{i}.attn_q_norm.weight", norm(SEEN_WIDTH // SEEN_HEADS)
        yield f"v.blk.{i}.attn_k_norm.weight", norm(SEEN_WIDTH // SEEN_HEADS)
    yield "v.std_bias", bias(SEEN_WIDTH)
    yield "v.std_scale", norm(SEEN_WIDTH)
    yield "mm.input_projection.weight", matrix(WIDTH, SEEN_WIDTH)


def unified_tower() -> Tensors:
    """Gemma 4's without a transformer: patches of 3 x 3 others are normed, multiplied, and become rows."""
    side = 3 * PATCH
    width = 3 * side * side
    yield "v.patch_embd.weight", matrix(SEEN_WIDTH, width)
    yield "v.patch_embd.bias", bias(SEEN_WIDTH)
    yield "v.position_embd.weight", Weight((2, 1200, SEEN_WIDTH), 0.3)
    for i, n in ((1, width), (2, SEEN_WIDTH), (3, SEEN_WIDTH)):
        yield f"v.patch_norm.{i}.weight", norm(n)
        yield f"v.patch_norm.{i}.bias", bias(n)
    yield "mm.input_projection.weight", matrix(WIDTH, SEEN_WIDTH)


def pixtral_tower() -> Tensors:
    yield patches()
    yield "v.pre_ln.weight", norm(SEEN_WIDTH)
    yield from seen_layers(biases=False, gate=True)
    yield "v.token_embd.img_break", bias(WIDTH)
    yield "mm.input_norm.weight", norm(SEEN_WIDTH)
    yield "mm.patch_merger.weight", matrix(SEEN_WIDTH, 4 * SEEN_WIDTH)
    yield "mm.1.weight", matrix(WIDTH, SEEN_WIDTH)
    yield "mm.2.weight", matrix(WIDTH, WIDTH)


SIDE = 8  # patches of a side that places are stored for
TOWERS: dict[str, tuple[str, Callable[[], Tensors], dict[str, object]]] = {
    "qwen3vl": ("qwen3vl_merger", lambda: qwen_tower(DEEPSTACK), {"use_gelu": True}),
    "qwen3vl-flat": ("qwen3vl_merger", lambda: qwen_tower(0), {"use_gelu": True}),
    "qwen35": ("qwen3vl_merger", lambda: qwen_tower(0), {"use_gelu": True}),
    "gemma3": ("gemma3", gemma3_tower, {"use_gelu": True, "vision.projector.scale_factor": 2}),
    "gemma4": ("gemma4v", gemma4_tower, {"use_gelu": True}),
    "gemma4-unified": (
        "gemma4uv",
        unified_tower,
        {"vision.block_count": 0, "vision.attention.head_count": 0, "vision.feed_forward_length": 0},
    ),
    "mistral3": ("pixtral", pixtral_tower, {"use_silu": True, "vision.spatial_merge_size": 2}),
}
UNIFIED = "gemma4-unified"  # a second kind of tower of a family
FAMILIES = tuple(family for family in TOWERS if family != UNIFIED)


def write_tower(family: str, path: Path, seed: int = 2, **said: object) -> Path:
    """The tower of a family; `said`: settings to have otherwise, a dot being two underscores."""
    kind, tensors, more = TOWERS[family]
    writer = GGUFWriter(None, "clip")
    writer.add_name(f"tiny-{family}")
    writer.add_file_type(1)
    numbers: dict[str, object] = {
        "has_vision_encoder": True,
        "projector_type": kind,
        "vision.image_size": SIDE * PATCH,
        "vision.patch_size": PATCH,
        "vision.embedding_length": SEEN_WIDTH,
        "vision.feed_forward_length": SEEN_FFN,
        "vision.projection_dim": WIDTH,
        "vision.block_count": SEEN_LAYERS,
        "vision.attention.head_count": SEEN_HEADS,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.image_mean": [0.5, 0.5, 0.5],
        "vision.image_std": [0.5, 0.5, 0.5],
    }
    add_numbers(writer, "clip", numbers | more | {k.replace("__", "."): v for k, v in said.items()})
    return made(path, writer, tensors(), seed)


def write_pair(family: str, folder: Path) -> Seeing:
    """A model of a family and its tower, with the names that people have."""
    folder.mkdir(parents=True, exist_ok=True)
    text = write_text(family, folder / f"tiny-{family}-F16.gguf")
    return Seeing(text, write_tower(family, folder / f"mmproj-tiny-{family}-F16.gguf"))


def gradient(width: int, height: int) -> bytes:
    """A picture, the same every time: its RGB bytes."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    rgb = np.stack([x, y, (x * y) % 256], 2)
    return rgb.astype(np.uint8).tobytes()
