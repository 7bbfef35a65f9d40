"""What costs a trip through memory for each row: norms, rotations, activations, sums.

Sums of squares and angles are float32 whatever comes in; results are bf16 where only products read them.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hetrun.backend import Floats, Ints
from hetrun.backends.amx.bf16_matmul import BF16, Activation
from hetrun.graph import Op
from hetrun.graph.ops import Gelu, LayerNorm, RmsNorm, Rope


def rms_norm(a: RmsNorm, x: Tensor, gain: Tensor, rounded: bool) -> Tensor:
    """The gain has the offset in it."""
    x = x.float()
    heads = x.view(len(x), a.heads, -1) if a.heads > 1 else x
    root = torch.linalg.vector_norm(heads, dim=-1, keepdim=True)
    root.square_().div_(heads.shape[-1]).add_(a.eps).rsqrt_()
    out = torch.mul(heads, root).mul_(gain).view(x.shape)
    return out.to(BF16) if rounded else out


def layer_norm(a: LayerNorm, x: Tensor, gain: Tensor | None, bias: Tensor | None, rounded: bool) -> Tensor:
    out = functional.layer_norm(x.float(), x.shape[-1:], gain, bias, a.eps)
    return out.to(BF16) if rounded else out


def activation(op: Op) -> Activation:
    """What a gate's first half, or a linear op's result, goes through."""
    match op.kind:
        case "swiglu":
            return "swish"
        case "relu":
            return "relu"
    assert isinstance(op.attrs, Gelu)
    return "gelu" if op.attrs.exact else "gelu-tanh"


# --- rotations


class Angles:
    """cos and sin of one pass, for each way to rotate: the same in every layer."""

    def __init__(self) -> None:
        self._made: dict[tuple[Rope, object, str], tuple[Tensor, Tensor]] = {}

    def of(self, a: Rope, positions: Ints, rows: str, factors: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, 1, pairs]; for neighbours as one complex number [rows, 1, pairs] and nothing."""
        key = (a, None if factors is None else factors.data_ptr(), rows)
        if key not in self._made:
            angles, magnitude = rope_angles(
                a, positions, None if factors is None else factors.numpy().reshape(-1)
            )
            cos, sin = (
                torch.from_numpy((f(angles) * magnitude).astype(np.float32))[:, None]
                for f in (np.cos, np.sin)
            )
            self._made[key] = (torch.complex(cos, sin), sin) if a.interleaved else (cos, sin)
        return self._made[key]


def rope(a: Rope, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x [rows, heads * head_dim] to float32 [rows, heads, head_dim], which are turned in place."""
    out = torch.empty(x.shape).copy_(x)
    heads = out.view(len(x), -1, a.head_dim)
    turned = heads[..., : a.n_rot]
    if a.interleaved:
        torch.view_as_complex(turned.view(*turned.shape[:2], -1, 2)).mul_(turn[0])
        return heads
    cos, sin = turn
    first, second = turned.chunk(2, -1)
    crossed = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(crossed)
    return heads


def rope_angles(a: Rope, positions: Ints, factors: Floats | None) -> tuple[np.ndarray, float]:
    """The angle of each position and pair, and what cos and sin are multiplied by (`Rope`)."""
    pairs = np.arange(a.n_rot // 2, dtype=np.float64)
    step = a.base ** (-2 * pairs / a.n_rot)
    if factors is not None:
        step = step / factors
    magnitude = a.attn_factor
    if a.ext_factor:
        keep = _yarn_ramp(a, pairs) * a.ext_factor
        step = step * (a.freq_scale * (1 - keep) + keep)
        magnitude *= 1 + 0.1 * math.log(1 / a.freq_scale)
    else:
        step = step * a.freq_scale
    return positions[:, None] * step, magnitude


def _yarn_ramp(a: Rope, pairs: np.ndarray) -> np.ndarray:
    """How much of a pair's angle stays as it is: all for those that turn often, nothing for slow ones."""

    def pair(turns: float) -> float:
        return a.n_rot * math.log(a.n_ctx_orig / (2 * math.pi * turns)) / (2 * math.log(a.base))

    low = max(0.0, math.floor(pair(a.beta_fast)))
    high = min(a.n_rot - 1.0, math.ceil(pair(a.beta_slow)))
    ramp: np.ndarray = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
    return ramp
