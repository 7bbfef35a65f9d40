"""What libmtmd is given in place of the text model: as wide as that one, with a layer of nothing.

It asks a text model how wide rows are, whether places have three parts, and for the tokens of its marks. The
weights of the real one are in memory already, and not as llama.cpp has them. The tokens here are bytes: marks
come back as their text, which the real model's own tokenizer turns into tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np

from hetrun.backends.llamacpp import libllama_api
from hetrun.backends.llamacpp.vocabulary.gguf_image import Shapes, copied
from hetrun.errors import BackendError
from hetrun.loader.formats.gguf_file import StringArray, Value

_HEAD = 8  # columns of the only head
_SPATIAL, _PLAIN = "qwen3vl", "llama"  # architectures whose places have three parts, or one


@contextmanager
def text_stand_in(width: int, spatial: bool) -> Iterator[int]:
    """A model of llama.cpp: rows of this width go into it."""
    lib = libllama_api.library()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False
    params.no_alloc = True  # its weights are never looked at
    params.load_mode = libllama_api.LOAD_READ
    with copied(_keys(width, spatial), _tensors(width, spatial)) as path:
        model = lib.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise BackendError("llama.cpp does not take the model that stands in for the text model")
    try:
        yield int(model)
    finally:
        lib.llama_model_free(model)


def _keys(width: int, spatial: bool) -> dict[str, Value]:
    name = _SPATIAL if spatial else _PLAIN
    own: dict[str, Value] = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": width,
        "feed_forward_length": 1,
        "attention.head_count": 1,
        "attention.key_length": _HEAD,
        "attention.value_length": _HEAD,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": _HEAD,
    }
    if spatial:
        own["rope.dimension_sections"] = np.array([2, 1, 1, 0], "<i4")
    return {
        "general.architecture": name,
        **{f"{name}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": _strings(_letters()),
        "tokenizer.ggml.token_type": np.ones(256, "<i4"),
        "tokenizer.ggml.merges": _strings([]),
    }


def _letters() -> list[str]:
    """GPT-2's printable letters for the bytes, in the order of these."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = count(256)
    return [chr(byte if byte in plain else next(free)) for byte in range(256)]


def _strings(texts: list[str]) -> StringArray:
    raw = [text.encode() for text in texts]
    blob = b"".join(len(r).to_bytes(8, "little") + r for r in raw)
    return StringArray(blob, np.cumsum([0, *(8 + len(r) for r in raw)], dtype=np.int64))


def _tensors(width: int, spatial: bool) -> Shapes:
    row, columns = (width,), (width, _HEAD)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": row,
        "ffn_norm": row,
        "attn_q": (_HEAD, width),
        "attn_k": (_HEAD, width),
        "attn_v": (_HEAD, width),
        "attn_output": columns,
        "ffn_gate": (1, width),
        "ffn_up": (1, width),
        "ffn_down": (width, 1),
    }
    if spatial:
        layer |= {"attn_q_norm": (_HEAD,), "attn_k_norm": (_HEAD,)}
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (256, width), "output_norm.weight": row}
    return found | {f"blk.0.{name}.weight": shape for name, shape in layer.items()}
