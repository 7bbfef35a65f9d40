"""What each op kind means, in numpy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hetrun.backend import Floats, Pass
from hetrun.backend.interpreter import OpFunction
from hetrun.backends.reference import activations
from hetrun.backends.reference.attention import attention
from hetrun.backends.reference.delta_net import causal_conv, delta_net
from hetrun.backends.reference.moe import moe
from hetrun.backends.reference.rope import rope
from hetrun.graph import Op
from hetrun.graph.ops import EverySecond, Gelu, Grow, LayerNorm, PerHead, Positions, RmsNorm, Scale, Softcap
from hetrun.memory.kv.cache import KvCache


def embed(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return w[0][work.tokens]


def positions(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    assert isinstance(op.attrs, Positions)
    return w[0][work.positions + op.attrs.offset]


def rms_norm(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    a = op.attrs
    assert isinstance(a, RmsNorm)
    heads = x[0].reshape(len(x[0]), a.heads, op.out.width // a.heads)
    mean = np.mean(np.square(heads), axis=-1, keepdims=True, dtype=np.float32)
    root: Floats = np.sqrt(mean + np.float32(a.eps), dtype=np.float32)
    out: Floats = heads / root * (np.float32(a.offset) + w[0])
    return out.reshape(x[0].shape)


def layer_norm(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    assert isinstance(op.attrs, LayerNorm)
    out: Floats = x[0] - np.mean(x[0], axis=-1, keepdims=True, dtype=np.float32)
    variance = np.mean(np.square(out), axis=-1, keepdims=True, dtype=np.float32)
    out /= np.sqrt(variance + np.float32(op.attrs.eps), dtype=np.float32)
    if w:
        out *= w[0]
    return out + w[1] if len(w) == 2 else out


def linear(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    y = x[0] @ w[0].T
    return y + w[1] if len(w) == 2 else y


def per_head(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    a, (rows, cols) = op.attrs, w[0].shape
    assert isinstance(a, PerHead)
    heads = x[0].reshape(len(x[0]), a.heads, x[0].shape[1] // a.heads)
    end = a.first + cols
    matrices = w[0].reshape(a.heads, rows // a.heads, cols)
    out = np.einsum("rhi,hoi->rho", heads[:, :, a.first : end], matrices, optimize=True)
    if a.passed:
        out = np.concatenate((heads[:, :, end:], out), axis=2)
    return np.ascontiguousarray(out, np.float32).reshape(len(x[0]), op.out.width)


def add(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return x[0] + x[1]


def concat(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return np.concatenate(x, axis=1)


def every_second(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    a = op.attrs
    assert isinstance(a, EverySecond)
    slices = x[0].reshape(len(x[0]), a.heads, 2, op.out.width // a.heads)
    return slices[:, :, a.first].reshape(len(x[0]), op.out.width)


def scale(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    assert isinstance(op.attrs, Scale)
    out: Floats = x[0] * np.float32(op.attrs.factor)
    return out * w[0] if w else out


def grow(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    assert isinstance(op.attrs, Grow)
    return x[0] * op.attrs.growth(work.along(0, op.rows))[:, None]


def softcap(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    assert isinstance(op.attrs, Softcap)
    cap = np.float32(op.attrs.cap)
    out: Floats = np.tanh(x[0] / cap) * cap
    return out


def select(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return x[0][work.wanted]


def swiglu(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return activations.silu(x[0]) * x[1]


def sigmoid_gate(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    with np.errstate(over="ignore"):
        out: Floats = x[1] / (1 + np.exp(-x[0]))
        return out


def multiply(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return x[0] * x[1]


def geglu(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return gelu(op, x, w, work, kv) * x[1]


def gelu(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    assert isinstance(op.attrs, Gelu)
    return activations.gelu(x[0], op.attrs.exact)


def relu(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return np.maximum(x[0], 0)


TABLE: Mapping[str, OpFunction] = {
    "embed": embed,
    "positions": positions,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "linear": linear,
    "head": linear,
    "per_head": per_head,
    "rope": rope,
    "attention": attention,
    "causal_conv": causal_conv,
    "delta_net": delta_net,
    "moe": moe,
    "swiglu": swiglu,
    "sigmoid_gate": sigmoid_gate,
    "multiply": multiply,
    "geglu": geglu,
    "gelu": gelu,
    "relu": relu,
    "scale": scale,
    "grow": grow,
    "softcap": softcap,
    "add": add,
    "concat": concat,
    "every_second": every_second,
    "select": select,
}
