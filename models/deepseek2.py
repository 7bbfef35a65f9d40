"""DeepSeek 2 and 3, GLM 4.7 Flash and Kimi K2: attention through a latent row, with absorbed weights.

A token's keys and values are one short row, of which matrices of each head would make them. Queries go
through the matrices of keys instead, and what attention finds through those of values, so that the cache
keeps that row: the columns that rope turns in front, then the latent ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta, PredictionBlock, Value
from hetrun.graph.ops import NONE, PerHead
from hetrun.models import blocks
from hetrun.models.decoder import Decoder, FeedForward, build_decoder, norm, read_decoder
from hetrun.models.deepseek2_import import HALVES, MAGNITUDE, name, read_folder
from hetrun.models.mixtures import SIGMOID, SOFTMAX, mixed_ffn, read_mixtures
from hetrun.models.mtp import decoder_block
from hetrun.models.rope import neutral

__all__ = ["build", "from_hf", "leaves", "name", "predicts"]

from_hf = read_folder

# Layers and tokens of the model of which some files do not say how it chooses experts.
GLM_4_7_FLASH = (47, 154880)


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The sizes of such an attention."""

    attention: blocks.AttentionShape  # of one latent head
    rank: int  # columns of the latent row
    q_rank: int  # the same of queries; 0: they are projected at once
    n_rot: int  # columns that rope turns
    plain: int  # columns of a query's head that it does not
    value: int  # columns of a head's result


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d, latent, feed_forward = _settings(b, meta)
    return build_decoder(b, d, feed_forward, lambda x, i: attention(b, x, d, latent, i))


def predicts(b: GraphBuilder, meta: ModelMeta) -> PredictionBlock | None:
    """The block that predicts one more token."""
    d, latent, feed_forward = _settings(b, meta)
    return decoder_block(b, d, feed_forward, lambda b, x, own, i: attention(b, x, own, latent, i))


def _settings(b: GraphBuilder, meta: ModelMeta) -> tuple[Decoder, LatentSizes, FeedForward]:
    d = read_decoder(b, meta, interleaved=not meta.get_bool(HALVES, False))
    latent = read_latent(b, meta, d)
    magnitude = meta.get_float(MAGNITUDE, 1.0)
    if d.rope.ext_factor and meta.get_float("rope.scaling.yarn_log_multiplier", 0.0):
        rope = replace(d.rope, attn_factor=magnitude * neutral(d.rope))
        d = replace(d, rope=rope, ropes=(rope,) * d.n_layers)
    is_glm = (d.n_layers, d.n_vocab) == GLM_4_7_FLASH
    mixtures = read_mixtures(b, meta, SIGMOID if is_glm else SOFTMAX, normalise=is_glm)
    if mixtures.moe.scores == "softmax":  # DeepSeek 2 measures a group by its best expert
        mixtures = replace(mixtures, moe=replace(mixtures.moe, group_best=1))
    return d, latent, mixed_ffn(b, mixtures)


def leaves(meta: ModelMeta) -> bool:
    """Whether a file is llama.cpp's: an old one, whose matrices of keys and values are not apart, or one with
    queries that grow with positions."""
    split = meta.get_int("attention.key_length_mla", 0, 0, 1 << 16)
    return not split or meta.get_float("attention.temperature_scale", 0.0) != 0


def read_latent(b: GraphBuilder, meta: ModelMeta, d: Decoder) -> LatentSizes:
    """The settings as GGUF names them."""
    heads = d.attention
    rank = meta.require_int("attention.kv_lora_rank", 1, 1 << 16)
    head = meta.require_int("attention.key_length_mla", 1, 1 << 16)
    n_rot = d.rope.n_rot
    b.check(heads.n_kv_heads == 1, f"a latent row is one head of keys, not {heads.n_kv_heads}")
    fits = heads.head_dim == rank + n_rot and head > n_rot
    b.check(fits, f"a key of {heads.head_dim} columns is not {rank} latent ones and {n_rot} of rope")
    scale = stretch(meta, 1 / d.rope.freq_scale) ** 2 / math.sqrt(head)
    return LatentSizes(
        replace(heads, scale=scale),
        rank,
        meta.get_int("attention.q_lora_rank", 0, 0, 1 << 16),
        n_rot,
        head - n_rot,
        meta.require_int("attention.value_length_mla", 1, 1 << 16),
    )


def stretch(meta: ModelMeta, factor: float) -> float:
    """By what YaRN makes scores larger, in queries and in keys."""
    return 1 + meta.get_float("rope.scaling.yarn_log_multiplier", 0.0) * math.log(max(1.0, factor))


def attention(b: GraphBuilder, x: Value, d: Decoder, m: LatentSizes, i: int) -> Value:
    """x + attention(norm(x)); only the wanted rows go on after the last layer's keys."""
    blk, shape = f"blk.{i}", replace(m.attention, window=d.windows[i])
    n = shape.n_heads
    h = norm(b, x, f"{blk}.attn_norm", d, "before")
    k = blocks.rope(b, latent_row(b, h, d, m, blk), replace(d.rope, n_heads=1), d.factors, "k")
    if i == d.n_layers - 1:
        h, x = blocks.select(b, h), blocks.select(b, x)
    q = queries(b, h, d, m, blk)
    keys = b.weight(f"{blk}.attn_k_b.weight", n * m.rank, m.plain)
    q = b.op("per_head", [q], [keys], PerHead(n, passed=True), shape.width, part="q")
    q = blocks.rope(b, q, d.rope, d.factors, "q")
    a = blocks.attend_latent(b, q, k, i, shape)
    values = b.weight(f"{blk}.attn_v_b.weight", n * m.value, m.rank)
    a = b.op("per_head", [a], [values], PerHead(n, first=m.n_rot), n * m.value, part="out")
    return blocks.add(b, x, blocks.linear(b, a, f"{blk}.attn_output", x.width, "out"), part="out")


def latent_row(b: GraphBuilder, h: Value, d: Decoder, m: LatentSizes, blk: str) -> Value:
    """What the cache keeps of a token, before rope turns its first columns."""
    both = b.weight(f"{blk}.attn_kv_a_mqa.weight", m.rank + m.n_rot, h.width)
    latent = b.op("linear", [h], [both.rows(0, m.rank)], NONE, m.rank, part="k")
    turned = b.op("linear", [h], [both.rows(m.rank, m.rank + m.n_rot)], NONE, m.n_rot, part="k")
    latent = blocks.rms_norm(b, latent, f"{blk}.attn_kv_a_norm.weight", d.eps, "k")
    return b.op("concat", [turned, latent], [], NONE, m.rank + m.n_rot, part="k")


def queries(b: GraphBuilder, h: Value, d: Decoder, m: LatentSizes, blk: str) -> Value:
    """All heads' queries, the columns that rope turns last in each."""
    width = m.attention.n_heads * (m.plain + m.n_rot)
    if not m.q_rank:
        return blocks.linear(b, h, f"{blk}.attn_q", width, "q")
    low = blocks.linear(b, h, f"{blk}.attn_q_a", m.q_rank, "q")
    low = blocks.rms_norm(b, low, f"{blk}.attn_q_a_norm.weight", d.eps, "q")
    return blocks.linear(b, low, f"{blk}.attn_q_b", width, "q")
