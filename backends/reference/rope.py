"""Rotary position embeddings, in numpy."""

from __future__ import annotations

import math

import numpy as np

from hetrun.backend import Floats, Pass
from hetrun.graph import Op
from hetrun.graph.ops import Rope
from hetrun.memory.kv.cache import KvCache


def rope(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    assert isinstance(op.attrs, Rope)
    a = op.attrs
    angles, magnitude = rope_angles(a, work.along(a.axis, op.rows), w[0].reshape(-1) if w else None)
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
