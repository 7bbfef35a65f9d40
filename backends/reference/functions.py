"""What each op kind means, in numpy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hetrun.backend import Floats, OpFunction, Pass
from hetrun.backends.reference.attention import attention
from hetrun.backends.reference.rotation import rope
from hetrun.graph import Op
from hetrun.kv import KvCache
from hetrun.ops import RmsNorm


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
