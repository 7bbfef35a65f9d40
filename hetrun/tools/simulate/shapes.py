"""Models without weights: settings enough to build a graph, for questions about machines.

A shape is a model's settings in GGUF's words and the type of its matrices. Its graph comes from the same file
in `models/` that builds the real model's; only the weights lie nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetrun import option_types
from hetrun.errors import OptionError
from hetrun.graph import Architecture, Graph, GraphBuilder, Weight
from hetrun.graph.quant import QUANTS, QuantType, by_name
from hetrun.loader.hf_mapping import Config


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A published model's measures."""

    name: str
    architecture: str
    layers: int
    settings: Mapping[str, object] = field(repr=False)
    biases: bool  # of products and norms
    own_head: bool  # the output has a matrix of its own
    quant: QuantType

    def graph(self, architecture: Architecture) -> Graph:
        """The forward step; `architecture` is the file in `models/` of that name."""
        meta = Config(self.name, {"block_count": self.layers, **self.settings})
        return architecture.build(_Builder(self), meta)


def shape_of(text: str) -> ModelShape:
    """A shape by name, `opt-30b`, with another type of weights behind a colon: `llama-70b:q4_0`."""
    name, _, kind = text.lower().partition(":")
    if name not in SHAPES:
        raise OptionError(option_types.unknown("shape", name, SHAPES))
    if (kind or "f16").upper() not in QUANTS:
        raise OptionError(option_types.unknown("type of weights", kind, [q.lower() for q in QUANTS]))
    shape = SHAPES[name]
    return ModelShape(
        f"{name}:{kind}" if kind else name,
        shape.architecture,
        shape.layers,
        shape.settings,
        shape.biases,
        shape.own_head,
        by_name((kind or "f16").upper()),
    )


class _Builder(GraphBuilder):
    """Finds every weight that the shape has, with whatever sizes the graph asks for."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(_Nowhere())
        self._shape = shape

    def has(self, name: str) -> bool:
        layer = re.match(r"blk\.(\d+)\.", name)
        if layer and int(layer[1]) >= self._shape.layers:
            return False
        if name == "output.weight":
            return self._shape.own_head
        if "_shexp." in name:
            return name.endswith(".weight")
        return self._shape.biases and (name.endswith(".bias") or name.endswith("norm.weight"))

    def weight(self, name: str, rows: int, width: int) -> Weight:
        vector = rows == 1 or width % self._shape.quant.block
        return Weight(name, (rows, width), by_name("F32") if vector else self._shape.quant, ())


class _Nowhere:
    path = "a shape"

    def find(self, name: str) -> Weight | None:
        return None


def _opt(name: str, layers: int, width: int, heads: int) -> ModelShape:
    settings = {
        "vocab_size": 50272,
        "context_length": 2048,
        "embedding_length": width,
        "feed_forward_length": 4 * width,
        "attention.head_count": heads,
    }
    return ModelShape(name, "opt", layers, settings, biases=True, own_head=False, quant=by_name("F16"))


def _llama(
    name: str, layers: int, width: int, heads: int, kv_heads: int, n_ff: int, vocab: int
) -> ModelShape:
    settings = {
        "vocab_size": vocab,
        "context_length": 4096,
        "embedding_length": width,
        "feed_forward_length": n_ff,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
    }
    return ModelShape(name, "llama", layers, settings, biases=False, own_head=True, quant=by_name("F16"))


def _qwen35(
    name: str, layers: int, width: int, heads: int, kv_heads: int, n_ff: int, v_heads: int, experts: int = 0
) -> ModelShape:
    """Qwen 3.5; with experts, `n_ff` is the width of each, and of the shared one."""
    settings = {
        "vocab_size": 248320,
        "context_length": 262144,
        "embedding_length": width,
        "feed_forward_length": n_ff,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": 256,
        "rope.dimension_count": 64,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 16,
        "ssm.time_step_rank": v_heads,
        "ssm.inner_size": 128 * v_heads,
        "expert_count": experts or None,
        "expert_used_count": (10 if experts > 256 else 8) if experts else None,
        "expert_feed_forward_length": n_ff if experts else None,
    }
    own_head = width > 2560  # the small ones have one matrix for both ends
    architecture = "qwen35moe" if experts else "qwen35"
    return ModelShape(
        name, architecture, layers, settings, biases=False, own_head=own_head, quant=by_name("F16")
    )


# The papers' models; their measures are those of the published configurations.
SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _opt("opt-6.7b", 32, 4096, 32),
        _opt("opt-13b", 40, 5120, 40),
        _opt("opt-30b", 48, 7168, 56),
        _opt("opt-66b", 64, 9216, 72),
        _opt("opt-175b", 96, 12288, 96),
        _llama("llama-7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("llama-8b", 32, 4096, 32, 8, 14336, 128256),
        _llama("llama-13b", 40, 5120, 40, 40, 13824, 32000),
        _llama("llama-70b", 80, 8192, 64, 8, 28672, 32000),
        _qwen35("qwen35-0.8b", 24, 1024, 8, 2, 3584, 16),
        _qwen35("qwen35-2b", 24, 2048, 8, 2, 6144, 16),
        _qwen35("qwen35-4b", 32, 2560, 16, 4, 9216, 32),
        _qwen35("qwen35-9b", 32, 4096, 16, 4, 12288, 32),
        _qwen35("qwen35-27b", 64, 5120, 24, 4, 17408, 48),
        _qwen35("qwen35-35b-a3b", 40, 2048, 16, 2, 512, 32, experts=256),
        _qwen35("qwen35-122b-a10b", 48, 3072, 32, 2, 1024, 64, experts=256),
        _qwen35("qwen35-397b-a17b", 60, 4096, 32, 2, 1024, 64, experts=512),
    )
}
