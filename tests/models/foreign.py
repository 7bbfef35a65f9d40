"""Tiny models of architectures that hetrun has no file for and llama.cpp has, with random weights.

`gpt2` has learned positions and layer norms, `gemma2` a sliding window in every other layer, `mamba` keeps a
state instead of keys and values, `jamba` has both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from tests.models.tiny import VOCAB, add_tokenizer

F32 = NDArray[np.float32]
Shapes = Mapping[str, tuple[int, ...]]
Settings = Mapping[str, int | float | list[int]]

LAYERS, EMBD, HEADS, FFN, CONTEXT, WINDOW = 2, 64, 2, 96, 256, 16
INNER, STATE, RANK, CONV = 2 * EMBD, 8, 4, 4  # of the layers with a state
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Foreign:
    """A file: its settings below `general.architecture`, and the shapes of its tensors."""

    architecture: str
    settings: Settings
    shapes: Shapes
    seed: int = 0
    gains: Mapping[str, float] = field(default_factory=dict)  # part of a name -> how much larger

    def __str__(self) -> str:
        return self.architecture

    def weights(self) -> dict[str, F32]:
        """Every tensor by its GGUF name: matrices keep unit size, norms lie around one, biases are small."""
        rng = np.random.default_rng(self.seed)
        return {name: self._draw(rng, name, shape) for name, shape in self.shapes.items()}

    def _draw(self, rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> F32:
        noise = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("ssm_a"):
            return np.asarray(-np.exp(noise), np.float32)  # the state must fade
        if "norm.weight" in name or name.endswith("ssm_d"):
            return 1 + noise * np.float32(0.2)
        if len(shape) == 1:
            return noise * np.float32(0.3)
        gain = next((g for part, g in self.gains.items() if part in name), 1.0)
        return noise * np.float32(gain * shape[-1] ** -0.5)


def _vectors(*names: str) -> Shapes:
    return {f"{name}.weight": (EMBD,) for name in names}


def _blocks(layers: Iterable[int], *parts: Shapes) -> Shapes:
    return {f"blk.{i}.{name}": shape for i in layers for part in parts for name, shape in part.items()}


def _both(name: str, *shape: int) -> Shapes:
    """A weight and its bias."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


_GENERAL: Settings = {
    "block_count": LAYERS,
    "context_length": CONTEXT,
    "embedding_length": EMBD,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
}
_ENDS: Shapes = {"token_embd.weight": (VOCAB, EMBD), "output_norm.weight": (EMBD,)}
_QKV: Shapes = {f"attn_{part}.weight": (EMBD, EMBD) for part in ("q", "k", "v", "output")}
_GATED: Shapes = {
    "ffn_gate.weight": (FFN, EMBD),
    "ffn_up.weight": (FFN, EMBD),
    "ffn_down.weight": (EMBD, FFN),
}
_SSM: Shapes = {
    "attn_norm.weight": (EMBD,),
    "ssm_in.weight": (2 * INNER, EMBD),
    **_both("ssm_conv1d", INNER, CONV),
    "ssm_x.weight": (RANK + 2 * STATE, INNER),
    **_both("ssm_dt", INNER, RANK),
    "ssm_a": (INNER, STATE),
    "ssm_d": (INNER,),
    "ssm_out.weight": (EMBD, INNER),
}
_SSM_SETTINGS: Settings = {
    "ssm.conv_kernel": CONV,
    "ssm.inner_size": INNER,
    "ssm.state_size": STATE,
    "ssm.time_step_rank": RANK,
    "attention.layer_norm_rms_epsilon": EPS,
}
_LARGE = {"attn_q": 1.6, "attn_k": 1.6, "attn_qkv": 1.3}  # attention that chooses shows wrong positions

GPT2 = Foreign(
    "gpt2",
    {**_GENERAL, "attention.layer_norm_epsilon": EPS},
    {
        **_ENDS,
        "output_norm.bias": (EMBD,),
        "position_embd.weight": (CONTEXT, EMBD),
        "output.weight": (VOCAB, EMBD),
        **_blocks(
            range(LAYERS),
            {
                "attn_norm.weight": (EMBD,),
                "attn_norm.bias": (EMBD,),
                **_both("attn_qkv", 3 * EMBD, EMBD),
                **_both("attn_output", EMBD, EMBD),
                "ffn_norm.weight": (EMBD,),
                "ffn_norm.bias": (EMBD,),
                **_both("ffn_up", FFN, EMBD),
                **_both("ffn_down", EMBD, FFN),
            },
        ),
    },
    gains={**_LARGE, "output.weight": 2.5},
)
GEMMA2 = Foreign(
    "gemma2",
    {
        **_GENERAL,
        "attention.head_count_kv": HEADS,
        "attention.key_length": EMBD // HEADS,
        "attention.value_length": EMBD // HEADS,
        "attention.sliding_window": WINDOW,
        "attention.layer_norm_rms_epsilon": EPS,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    {
        **_ENDS,
        **_blocks(
            range(LAYERS),
            _vectors("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
            _QKV,
            _GATED,
        ),
    },
    gains=_LARGE,
)
MAMBA = Foreign(
    "mamba",
    {**_GENERAL, **_SSM_SETTINGS, "attention.head_count": 0, "feed_forward_length": 0},
    {**_ENDS, **_blocks(range(LAYERS), _SSM)},
    gains={"token_embd": 2.5},
)
JAMBA = Foreign(
    "jamba",
    {**_GENERAL, **_SSM_SETTINGS, "attention.head_count_kv": [0, HEADS]},
    {
        **_ENDS,
        **_blocks(
            [0], _SSM, {f"ssm_{x}_norm.weight": (n,) for x, n in (("dt", RANK), ("b", STATE), ("c", STATE))}
        ),
        **_blocks([1], _vectors("attn_norm"), _QKV),
        **_blocks(range(LAYERS), _vectors("ffn_norm"), _GATED),
    },
    gains={**_LARGE, "token_embd": 2.5},
)
ALL = (GPT2, GEMMA2, MAMBA, JAMBA)


def write(
    model: Foreign,
    path: Path,
    changed: Mapping[str, int | float] | None = None,
    without: str = "",
    weights: Mapping[str, F32] | None = None,
) -> Path:
    """Write the model's file: with other settings, without one of its tensors, or with other weights."""
    writer = GGUFWriter(path, model.architecture)
    writer.add_name(f"tiny {model.architecture}")
    for key, value in {**model.settings, **(changed or {})}.items():
        name = f"{model.architecture}.{key}"
        if isinstance(value, list):
            writer.add_key_value(name, value, GGUFValueType.ARRAY, GGUFValueType.UINT32)
        else:
            kind = GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.UINT32
            writer.add_key_value(name, value, kind)
    add_tokenizer(writer)
    for name, values in {**model.weights(), **(weights or {})}.items():
        if name != without:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
