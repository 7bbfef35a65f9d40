"""Products in int8: twice the rate of bf16 ones and half their memory, for those who ask for `fast`.

Weights are int8 with a scale for each output, activations are int8 with a scale for each row. In most models
a few columns of the activations are far larger than the rest, and would take most of the 8 bits away from all
others. So both sides are turned before they are rounded: each block of 64 columns is multiplied by a matrix
that shares every number out among all 64. Its columns are at right angles to each other, so the product of
the two sides stays what it was; but what was large in one column is now a little in each of its block.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hetrun.backend import Floats, ReadInto
from hetrun.backends.amx.bf16_matmul import BF16, Activation, activate
from hetrun.backends.amx.sizes import int8_bytes
from hetrun.backends.amx.weight_slices import slices, spans
from hetrun.graph import Weight

ZERO = 128  # oneDNN wants codes of activations without a sign, and takes this off them
LARGEST = 127  # code of a weight
STEPS = 126.5  # to a row's largest number, whose code is 127 at most even if the scale is rounded down
BLOCK = 64  # columns that are turned together
AT_ONCE = 1 << 19  # numbers that one step after the other is done with: they stay in the cores' own caches


def turn(cols: int) -> Tensor:
    """The matrix to multiply blocks of a row of `cols` columns by.

    It is a Hadamard matrix: every number is 1 or -1, which bf16 has. As it stands it also makes everything
    larger, by the root of its size. Rows of one sign would come out as one large number again, if all its
    rows began with 1: so these have random signs.
    """
    out = torch.ones(1, 1)
    while len(out) < BLOCK and cols % (2 * len(out)) == 0:
        out = torch.cat((torch.cat((out, out), 1), torch.cat((out, -out), 1)))
    signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), (len(out), 1))
    return out * torch.from_numpy(signs)


class Int8Product:
    """A weight [m, k] in int8."""

    def __init__(self, shape: tuple[int, int], parts: Iterable[tuple[int, int, Floats]]) -> None:
        """`parts` are rows a to b of the weight, in memory that the next ones may overwrite."""
        m, k = shape
        full = turn(k)
        weight, self._scale = torch.empty(shape, dtype=torch.int8), torch.empty(m)
        for a, b, part in parts:
            rows = torch.mm(torch.from_numpy(part).view(-1, len(full)), full).view(b - a, k)
            scale = rows.abs().amax(1).div_(LARGEST).clamp_min_(1e-30)
            weight[a:b] = rows.div_(scale[:, None]).round_()
            self._scale[a:b] = scale / len(full)  # both sides have become larger by the root of this
        self._packed = pack8(weight)
        self._turn = full.to(BF16)
        self.size = m * k
        self.nbytes = int8_bytes(m, k)

    @classmethod
    def make(cls, rows: Floats) -> Int8Product:
        """From a matrix that is in memory."""
        return cls((rows.shape[0], rows.shape[1]), [(0, len(rows), rows)])

    @classmethod
    def upload(cls, weight: Weight, read: ReadInto) -> Int8Product:
        """From a file."""
        return cls(weight.shape, slices(weight, read))

    def __call__(self, x: Tensor, bias: Tensor | None = None, act: Activation = "none") -> Tensor:
        """x [n, k] in bf16 to [n, m], through an activation; the bias is float32."""
        codes, scale = self._codes(x)
        out = self._times(codes)
        for a, b in _steps(out):
            _finish(out[a:b], scale[a:b], bias, act)
        return out

    def gated(
        self,
        up: Int8Product,
        x: Tensor,
        act: Activation,
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Tensor:
        """act(self(x)) * up(x): x is rounded once for both."""
        codes, scale = self._codes(x)
        gate, out = self._times(codes), up._times(codes)
        for a, b in _steps(out):
            _finish(out[a:b], scale[a:b], biases[1], "none")
            out[a:b].mul_(_finish(gate[a:b], scale[a:b], biases[0], act))
        return out

    def _times(self, codes: Tensor) -> Tensor:
        return multiply8(codes, self._packed, self._scale, BF16)

    def _codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x turned, as codes that are ZERO for nothing, and each row's scale."""
        k, steps = x.shape[1], _steps(x)
        rows = max((b - a for a, b in steps), default=0)
        turned, sizes = torch.empty(rows, k, dtype=BF16), torch.empty(rows, k, dtype=BF16)
        floats = torch.empty(rows, k)
        codes, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x), 1, dtype=BF16)
        block = len(self._turn)
        for a, b in steps:
            here = turned[: b - a]
            torch.mm(x[a:b].reshape(-1, block), self._turn, out=here.view(-1, block))
            # Positive numbers are in the order of their bits: whole numbers are compared ten times as fast.
            bits = torch.abs(here, out=sizes[: b - a]).view(torch.int16)
            largest = bits.amax(1, keepdim=True).view(BF16)
            # Rounded to bf16, as the result is multiplied by it.
            scale = scales[a:b] = (largest.float() / STEPS).clamp_min_(1e-30).to(BF16)
            codes[a:b] = floats[: b - a].copy_(here).mul_(1 / scale.float()).round_()
            codes[a:b].bitwise_xor_(-ZERO)  # adds ZERO, seen as numbers without a sign
        return codes.view(torch.uint8), scales


def _steps(x: Tensor) -> list[tuple[int, int]]:
    """Rows that are done with before the next ones are begun."""
    return list(spans(len(x), max(1, AT_ONCE // x.shape[1])))


def _finish(x: Tensor, scale: Tensor, bias: Tensor | None, act: Activation) -> Tensor:
    """Give products their rows' scales, a bias and an activation, where they lie."""
    if bias is None:
        x.mul_(scale)
    else:
        torch.addcmul(bias.to(BF16), x, scale, out=x)
    if act == "swish":
        return torch.nn.functional.silu(x, inplace=True)
    return x if act == "none" else x.copy_(activate(x, act))


# --- the int8 product itself. It is torch's own inner interface: where it is missing, a public one does.

_packs: bool | None = None


def packs8() -> bool:
    """Whether torch has oneDNN's int8 products here, and gets right results out of them: tried once."""
    global _packs
    if _packs is None:
        _packs = _try()
    return _packs


def _try() -> bool:
    codes = torch.arange(4 * 64).view(4, 64).to(torch.uint8)
    weight = torch.arange(-96, 96).repeat(11)[: 32 * 64].view(32, 64).to(torch.int8)
    scale = torch.full((32,), 0.25)
    try:
        found = _onednn(codes, torch.ops.onednn.qlinear_prepack(weight, None), scale, torch.float32)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(found, 0.25 * (codes.float() - ZERO) @ weight.float().t())


def _onednn(codes: Tensor, packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros(len(scale), dtype=torch.int32)
    out: Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, ZERO, packed, scale, zeros, None, 1.0, 0, dtype, "none", [], ""
    )
    return out


def pack8(weight: Tensor) -> Tensor:
    """An int8 weight [m, k] in the layout that products read."""
    if not packs8():
        return weight.t().contiguous()
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
    return packed


def multiply8(codes: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(codes - ZERO) times a weight as `pack8` gave it, times the scale of each output."""
    if packs8():
        return _onednn(codes, weight, scale, dtype)
    signed = codes.to(torch.int16).sub_(ZERO).to(torch.int8)
    return (torch._int_mm(signed, weight) * scale).to(dtype)
