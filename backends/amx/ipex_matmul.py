"""Products of few rows through IPEX, whose kernels lose less on the way into a product than oneDNN's do.

IPEX holds a weight in blocks of 32 outputs by 64 inputs, the inputs in pairs, as a tile wants them, and calls
these kernels TPP. Up to some sixty rows they are ahead: by half on small matrices, where a product takes
microseconds. With more rows torch's oneDNN is: so a weight is held in both layouts, and rows decide.

Importing this module loads IPEX: it registers `torch.ops.torch_ipex`, and replaces some of torch's operators.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hetrun.backend import ReadInto
from hetrun.backends.amx.bf16_matmul import BF16, Activation, PackedProduct, rounded
from hetrun.backends.amx.sizes import IPEX_COLS, IPEX_ROWS, has_blocks, matrix_bytes
from hetrun.graph import Weight

# IPEX prepares torch's compiler, which begins with a process of 600 MB; nothing is compiled here.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
import_module("intel_extension_for_pytorch")

FEW = 64  # rows; torch is level there on small matrices, and ahead from twice as many on most
PAIR = 2  # bf16 numbers that are multiplied and added at once

_NAMES = {"swish": "silu", "relu": "relu", "gelu": "gelu", "gelu-tanh": "gelu_tanh"}
_NO_BIAS = torch.empty(0, dtype=BF16)


class IpexProduct(PackedProduct):
    """A bf16 copy for many rows, and one in IPEX's blocks for few."""

    def __init__(self, weight: Weight, read: ReadInto) -> None:
        super().__init__(weight, read)
        self.nbytes = matrix_bytes(*weight.shape, "ipex")
        self._width = weight.shape[0]
        self._blocks = blocks(rounded(weight, read)) if has_blocks(*weight.shape) else None

    def __call__(self, x: Tensor, bias: Tensor | None = None, act: Activation = "none") -> Tensor:
        if self._blocks is None or len(x) > FEW:
            return super().__call__(x, bias, act)
        # These kernels read rows that lie one behind the other, whatever they are given.
        x, bias = x.contiguous(), _NO_BIAS if bias is None else bias.to(BF16)
        if act == "none":
            out: Tensor = _ops().tpp_linear_bias(x, self._blocks, bias, self._width)
        else:
            out = getattr(_ops(), f"tpp_linear_{_NAMES[act]}")(x, self._blocks, bias, self._width)
        return out

    def times(self, x: Tensor, bias: Tensor | None, other: Tensor) -> Tensor:
        if self._blocks is None or len(x) > FEW:
            return super().times(x, bias, other)
        bias = _NO_BIAS if bias is None else bias.to(BF16)
        out: Tensor = _ops().tpp_linear_mul(
            x.contiguous(), other.contiguous(), self._blocks, bias, self._width
        )
        return out


def blocks(weight: Tensor) -> Tensor:
    """A bf16 weight [m, k] as [m / 32, k / 64, 32 pairs of inputs, 32 outputs, 2]."""
    rows, cols = weight.shape
    parts = weight.view(rows // IPEX_ROWS, IPEX_ROWS, cols // IPEX_COLS, IPEX_COLS // PAIR, PAIR)
    return parts.permute(0, 2, 3, 1, 4).contiguous()


def _ops() -> Any:  # noqa: ANN401 - torch's operators have no types
    return torch.ops.torch_ipex
