"""Products in int8: twice the rate of bf16 ones and half their memory, for those who ask for `fast`.

Weights are int8 with a scale for each output, activations are uint8 with a scale and a zero for each row. A
few columns of the activations are far larger than the rest in most models, and would take most of the 8 bits
away from all others: they are left out of the int8 product and multiplied in bf16. Which ones they are is
found in the first passes. Their weights are read back out of the int8 ones, by multiplying unit vectors: so
only those columns are kept twice, and no weight is read again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hetrun.backend import Floats, ReadInto
from hetrun.backends.amx.products import BF16, multiply, pack
from hetrun.backends.amx.sizes import exact_columns, int8_bytes
from hetrun.backends.amx.stored import slices
from hetrun.graph import Weight

ZERO = 128  # of oneDNN's activations; a row's own zero goes with the exact columns
STEPS = 253  # between a row's smallest and largest number; rounding both may take one more, and one is spare
CORRECTIONS = 3  # columns that shift a row to its own zero: one number in two halves by another in two
ENOUGH_ROWS = 512  # more rows than that do not tell more about columns
AT_ONCE = 1 << 20  # activations that are float32 at one time: about what fits into the cores' own caches


class Int8Product:
    """A weight [m, k] in int8."""

    def __init__(self, shape: tuple[int, int], parts: Iterable[tuple[int, int, Floats]]) -> None:
        """`parts` are rows a to b of the weight, in memory that the next ones may overwrite."""
        m, k = shape
        weight, self._scale = torch.empty(shape, dtype=torch.int8), torch.empty(m)
        for a, b, part in parts:
            rows = torch.from_numpy(part)
            self._scale[a:b] = rows.abs().amax(1).div_(127).clamp_min_(1e-30)
            weight[a:b] = torch.round(rows / self._scale[a:b, None])
        self._packed = pack8(weight)
        self._width = k
        self._columns = torch.empty(0, dtype=torch.int64)
        self._keep = torch.empty(0)
        self._exact = torch.empty(0, dtype=BF16)
        self._rows_seen = 0  # by which the columns were chosen
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

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [n, k] in bf16 to [n, m]; the bias is float32."""
        if self._rows_seen < ENOUGH_ROWS and len(x) > 2 * self._rows_seen:
            self._choose(x)
        codes, scale, shift = self._quantise(x)
        whole = shift.to(BF16)
        rest = (shift - whole).to(BF16)
        exact = torch.cat((x.index_select(1, self._columns), whole, whole, rest), 1)
        done = multiply(exact, self._exact, bias)
        return torch.addcmul(done, multiply8(codes, self._packed, self._scale, BF16), scale.to(BF16))

    def _quantise(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes without the exact columns, each row's scale, and what is missing in each number of a row.

        A number is scale * (code - ZERO) + shift. The zero is a code, so the columns left out cost nothing.
        """
        codes = torch.empty(x.shape, dtype=torch.uint8)
        scale, shift = torch.empty(len(x), 1), torch.empty(len(x), 1)
        step = max(1, AT_ONCE // x.shape[1])
        stage = torch.empty(min(step, len(x)), x.shape[1])
        for at in range(0, len(x), step):
            part = x[at : at + step]
            floats = stage[: len(part)].copy_(part).mul_(self._keep)
            # All rows have columns of zeros now: the smallest is not above 0, the largest not below.
            low, high = floats.amin(1, keepdim=True), floats.amax(1, keepdim=True)
            # Rounded to bf16, as the result is multiplied by it.
            size = ((high - low) / STEPS).clamp_min_(1e-30).to(BF16).float()
            zero = torch.round(-low / size).add_(1)
            # The conversion cuts off: what is added rounds.
            torch.addcmul(zero + 0.5, floats, 1 / size, out=floats)
            codes[at : at + step] = floats
            scale[at : at + step] = size
            shift[at : at + step] = (ZERO - zero) * size
        return codes, scale, shift

    def _choose(self, x: Tensor) -> None:
        """Keep the columns exact that are largest in these rows."""
        self._rows_seen = len(x)
        n = min(self._width, exact_columns(self._width) - CORRECTIONS)
        columns = x.float().square().sum(0).topk(n).indices.sort().values
        if torch.equal(columns, self._columns):
            return
        self._columns = columns
        self._keep = torch.ones(self._width)
        self._keep[columns] = 0.0
        # Unit vectors give the columns, a vector of ones their sums, by which a shift is multiplied.
        probes = torch.full((n + 1, self._width), ZERO, dtype=torch.uint8)
        probes[torch.arange(n), columns] = ZERO + 1
        probes[n] = ZERO + 1
        found = multiply8(probes, self._packed, self._scale, torch.float32)
        total = found[n:]
        whole = total.to(BF16)
        rest = (total - whole).to(BF16)
        self._exact = pack(torch.cat((found[:n].to(BF16), whole, rest, whole)).t().contiguous())


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
