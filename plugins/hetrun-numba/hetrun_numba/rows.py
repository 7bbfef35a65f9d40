"""What stands between the products of a layer: norms, gates, sums and rotations, row by row."""

from __future__ import annotations

import math

import numba
import numpy as np

from hetrun.backend import Floats, Pass
from hetrun.graph import Op
from hetrun.graph.ops import RmsNorm, Rope
from hetrun.memory.kv.cache import KvCache
from hetrun_numba.compiling import compiled, inlined

MANY = 1 << 15  # numbers: to wake a second thread for fewer takes longer than they do


@inlined
def exp(x: np.float32) -> np.float32:
    """e^x, to the last bits of float32 and without a call, so that LLVM makes vectors of it."""
    inside = min(np.float32(88), max(np.float32(-87), x))
    whole = np.floor(inside * np.float32(1.4426950408889634) + np.float32(0.5))
    # ln 2 in two parts, the first with so few digits that nothing is rounded.
    part = (inside - whole * np.float32(0.693359375)) - whole * np.float32(-2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * part + np.float32(1.3981999507e-3)
    y = y * part + np.float32(8.3334519073e-3)
    y = y * part + np.float32(4.1665795894e-2)
    y = y * part + np.float32(1.6666665459e-1)
    y = y * part + np.float32(5.0000001201e-1)
    y = y * part * part + part + np.float32(1)
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return y * power if x == x else x


@inlined
def _norm(x: Floats, weight: Floats, eps: float, offset: float, out: Floats, a: int, b: int) -> None:
    for row in range(a, b):
        total = np.float32(0)
        for k in range(x.shape[1]):
            total += x[row, k] * x[row, k]
        factor = np.float32(1 / math.sqrt(total / x.shape[1] + eps))
        for k in range(x.shape[1]):
            out[row, k] = x[row, k] * factor * (weight[k] + np.float32(offset))


_NORM = "void(float32[:, ::1], float32[::1], float64, float64, float32[:, ::1])"


@compiled(_NORM, reorder=True)
def norm_few(x: Floats, weight: Floats, eps: float, offset: float, out: Floats) -> None:
    """Root mean square normalisation of rows."""
    _norm(x, weight, eps, offset, out, 0, x.shape[0])


@compiled(_NORM, reorder=True, parallel=True)
def norm_many(x: Floats, weight: Floats, eps: float, offset: float, out: Floats) -> None:
    """The same on several threads."""
    for row in numba.prange(x.shape[0]):
        _norm(x, weight, eps, offset, out, row, row + 1)


@inlined
def _gate(gate: Floats, x: Floats, out: Floats, row: int) -> None:
    for k in range(x.shape[1]):
        out[row, k] = gate[row, k] / (np.float32(1) + exp(-gate[row, k])) * x[row, k]


_TWO = "void(float32[:, ::1], float32[:, ::1], float32[:, ::1])"


@compiled(_TWO)
def gate_few(gate: Floats, x: Floats, out: Floats) -> None:
    """silu(gate) * x."""
    for row in range(x.shape[0]):
        _gate(gate, x, out, row)


@compiled(_TWO, parallel=True)
def gate_many(gate: Floats, x: Floats, out: Floats) -> None:
    """The same on several threads."""
    for row in numba.prange(x.shape[0]):
        _gate(gate, x, out, row)


@compiled(
    "void(float32[:, :, ::1], float32[:, ::1], float32[:, ::1], boolean, float32[:, :, ::1])", parallel=True
)
def turn(x: Floats, cos: Floats, sin: Floats, neighbours: bool, out: Floats) -> None:
    """Rotate pairs of the columns of each head; the columns behind them stay."""
    half = cos.shape[1]
    for row in numba.prange(x.shape[0]):
        for head in range(x.shape[1]):
            for k in range(2 * half, x.shape[2]):
                out[row, head, k] = x[row, head, k]
            for k in range(half):
                a, b = (2 * k, 2 * k + 1) if neighbours else (k, k + half)
                first, second = x[row, head, a], x[row, head, b]
                out[row, head, a] = first * cos[row, k] - second * sin[row, k]
                out[row, head, b] = first * sin[row, k] + second * cos[row, k]


def contiguous(x: Floats) -> Floats:
    """Rows without gaps, as the kernels want them."""
    return np.ascontiguousarray(x, np.float32)


def rms_norm(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    a = op.attrs
    assert isinstance(a, RmsNorm)
    heads = contiguous(x[0]).reshape(-1, op.out.width // a.heads)
    out = np.empty_like(heads)
    (norm_few if heads.size < MANY else norm_many)(heads, w[0].reshape(-1), a.eps, a.offset, out)
    return out.reshape(x[0].shape)


def swiglu(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    gate, other = contiguous(x[0]), contiguous(x[1])
    out = np.empty_like(gate)
    (gate_few if gate.size < MANY else gate_many)(gate, other, out)
    return out


def add(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return x[0] + x[1]


def select(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return x[0][work.wanted]


def rope(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    a = op.attrs
    assert isinstance(a, Rope)
    positions = work.positions if op.rows == "tokens" else work.positions[work.wanted]
    pairs = np.arange(a.n_rot // 2, dtype=np.float64)
    turns = a.base ** (-2 * pairs / a.n_rot) * a.freq_scale
    if w:
        turns /= w[0].reshape(-1)
    angles = (positions[:, None] * turns).astype(np.float32)
    factor = np.float32(a.attn_factor)
    heads = contiguous(x[0]).reshape(-1, a.n_heads, a.head_dim)
    out = np.empty_like(heads)
    turn(heads, np.cos(angles) * factor, np.sin(angles) * factor, a.interleaved, out)
    return out.reshape(x[0].shape)
