"""What each op kind means, in numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hetrun.backend import Floats, OpFunction, Pass
from hetrun.graph import Op
from hetrun.kv import KvCache
from hetrun.ops import Attention, RmsNorm, Rope


def embed(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return w[0][work.tokens]


def rms_norm(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    assert isinstance(op.attrs, RmsNorm)
    mean = np.mean(np.square(x[0]), axis=-1, keepdims=True, dtype=np.float32)
    root: Floats = np.sqrt(mean + np.float32(op.attrs.eps), dtype=np.float32)
    out: Floats = x[0] / root * w[0]
    return out


def linear(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    y = x[0] @ w[0].T
    return y + w[1] if len(w) == 2 else y


def add(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return x[0] + x[1]


def select(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return x[0][work.wanted]


def swiglu(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    gate, up = x
    # exp overflows to inf for very negative gates, and x / inf is the 0 that silu has there.
    with np.errstate(over="ignore"):
        out: Floats = gate / (1 + np.exp(-gate)) * up
        return out


def rope(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    assert isinstance(op.attrs, Rope)
    a = op.attrs
    positions = work.positions if op.rows == "tokens" else work.positions[work.wanted]
    angles, magnitude = rope_angles(a, positions, w[0].reshape(-1) if w else None)
    cos, sin = (np.cos(angles) * magnitude)[:, None, :], (np.sin(angles) * magnitude)[:, None, :]
    heads = x[0].reshape(-1, a.n_heads, a.head_dim)
    out = heads.copy()
    half = a.n_rot // 2
    first = slice(0, a.n_rot, 2) if a.interleaved else slice(0, half)
    second = slice(1, a.n_rot, 2) if a.interleaved else slice(half, a.n_rot)
    out[..., first] = heads[..., first] * cos - heads[..., second] * sin
    out[..., second] = heads[..., first] * sin + heads[..., second] * cos
    return out.reshape(x[0].shape)


def rope_angles(a: Rope, positions: np.ndarray, factors: Floats | None) -> tuple[Floats, np.float32]:
    """The angle of each position and pair, and what cos and sin are multiplied by."""
    pairs = np.arange(a.n_rot // 2, dtype=np.float64)
    angles = positions[:, None].astype(np.float64) * a.base ** (-2 * pairs / a.n_rot)
    if factors is not None:
        angles = angles / factors
    magnitude = a.attn_factor
    if a.ext_factor:
        keep = yarn_ramp(a, pairs) * a.ext_factor
        angles = angles * a.freq_scale * (1 - keep) + angles * keep
        magnitude *= 1 + 0.1 * math.log(1 / a.freq_scale)
    else:
        angles = angles * a.freq_scale
    return angles.astype(np.float32), np.float32(magnitude)


def yarn_ramp(a: Rope, pairs: np.ndarray) -> np.ndarray:
    """1 for pairs that turn often enough to keep their angle, 0 for those that are scaled, linear between."""

    def pair_of(rotations: float) -> float:
        return a.n_rot * math.log(a.n_ctx_orig / (rotations * 2 * math.pi)) / (2 * math.log(a.base))

    low = max(0.0, math.floor(pair_of(a.beta_fast)))
    high = min(a.n_rot - 1.0, math.ceil(pair_of(a.beta_slow)))
    ramp: np.ndarray = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
    return ramp


def attention(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    assert isinstance(op.attrs, Attention)
    a = op.attrs
    q, k, v = x
    keys, values = kv.tables[a.layer]
    keys.write(work.slots, k)
    values.write(work.slots, v)
    out = np.empty((len(q), a.n_heads * a.head_dim), np.float32)
    for part in work.parts:
        rows = part.kv.rows
        if op.rows == "tokens":
            lo, hi = part.a, part.b
            seen = np.arange(hi - lo)
        else:
            lo, hi = part.wanted_a, part.wanted_b
            seen = work.wanted[lo:hi] - part.a
        if hi > lo:
            seen = seen + part.kv.length - (part.b - part.a) + 1
            out[lo:hi] = attend(a, q[lo:hi], keys.read(rows), values.read(rows), seen)
    return out


def attend(a: Attention, q: Floats, k: Floats, v: Floats, seen: np.ndarray) -> Floats:
    """One sequence: query row i sees the first seen[i] rows of k and v."""
    group = a.n_heads // a.n_kv_heads
    q = q.reshape(len(q), a.n_kv_heads, group, a.head_dim)
    hidden = np.arange(len(k))[None, :] >= seen[:, None]
    out = np.empty_like(q)
    for h in range(a.n_kv_heads):
        scores = q[:, h] @ k[:, h].T * np.float32(a.scale)  # [rows, group, seen]
        scores[np.broadcast_to(hidden[:, None, :], scores.shape)] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, h] = (scores @ v[:, h]) / scores.sum(axis=-1, keepdims=True)
    return out.reshape(len(q), a.n_heads * a.head_dim)


TABLE: Mapping[str, OpFunction] = {
    "embed": embed,
    "rms_norm": rms_norm,
    "linear": linear,
    "head": linear,
    "rope": rope,
    "attention": attention,
    "swiglu": swiglu,
    "add": add,
    "select": select,
}
