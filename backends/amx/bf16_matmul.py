"""Weights that rows are multiplied by: packed once for bf16 products, or as stored and unpacked each time.

oneDNN sums in float32 whatever its inputs are; only what goes in and comes out is rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from hetrun.backend import ReadInto
from hetrun.backends.amx.sizes import NARROW, TILE, matrix_bytes
from hetrun.backends.amx.weight_slices import IN_CACHE, Bytes, dequantise, slices, spans, stored
from hetrun.graph import Weight
from hetrun.graph.quant import QuantType

BF16 = torch.bfloat16
MANY = 256  # rows of a pass
AT_ONCE = 32 << 20  # weights packed together; larger ones (heads) are several, and their results put together

Activation = Literal["none", "swish", "relu", "gelu", "gelu-tanh"]
_ALGORITHMS = {"gelu": ("gelu", "none"), "gelu-tanh": ("gelu", "tanh")}


@runtime_checkable
class Bf16Product(Protocol):
    """A weight [m, k] that rows are multiplied by."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        ...

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [n, k] in bf16 to [n, m]; the bias is float32."""
        ...


@runtime_checkable
class FusedActivation(Bf16Product, Protocol):
    """A product that activations run inside of."""

    def __call__(self, x: Tensor, bias: Tensor | None = None, act: Activation = "none") -> Tensor:
        """x [n, k] in bf16 to [n, m], through an activation."""
        ...

    def gated(
        self,
        up: Self,
        x: Tensor,
        act: Activation,
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Tensor:
        """act(self(x)) * up(x)."""
        ...


class PackedProduct:
    """A bf16 copy in the layout that oneDNN's kernels read: half of their time would be packing otherwise."""

    def __init__(self, weight: Weight, read: ReadInto) -> None:
        rows, cols = weight.shape
        self.nbytes = matrix_bytes(rows, cols, "packed")
        # Held twice: with many rows a plain one is faster by half, with few the packed one is twice as fast.
        self._plain = rounded(weight, read) if rows <= NARROW else None
        self._parts = [
            pack(rounded(weight.rows(a, b), read)) for a, b in spans(rows, max(TILE, AT_ONCE // cols))
        ]

    def __call__(self, x: Tensor, bias: Tensor | None = None, act: Activation = "none") -> Tensor:
        """x [n, k] in bf16 to [n, m], through an activation that costs no pass of its own."""
        if self._plain is not None and len(x) > MANY:
            plain = torch.nn.functional.linear(x, self._plain, None if bias is None else bias.to(BF16))
            return activate(plain, act)
        if len(self._parts) == 1:
            return multiply(x, self._parts[0], bias, act)
        biases = (
            [None] * len(self._parts) if bias is None else torch.split(bias, [len(p) for p in self._parts])
        )
        return torch.cat([multiply(x, p, b, act) for p, b in zip(self._parts, biases, strict=True)], dim=1)

    def precise(self, x: Tensor) -> Tensor:
        """x [n, k] in bf16 to float32 [n, m]: the rounded product, and what the rounding took from it.

        Products give bf16 only; a second one, less the first, has the rest. It is for logits: rounded to 8
        bits they are three times as far from the model's as all other rounding together takes them.
        """
        found = []
        for part in self._parts:
            y = multiply(x, part, None)
            found.append(y.float() + _less(x, part, y))
        return torch.cat(found, dim=1) if len(found) > 1 else found[0]

    def gated(
        self,
        up: Self,
        x: Tensor,
        act: Activation,
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Tensor:
        """act(self(x)) * up(x)."""
        return up.times(x, biases[1], self(x, biases[0], act))

    def times(self, x: Tensor, bias: Tensor | None, other: Tensor) -> Tensor:
        """The product's result times another of the same shape."""
        if len(self._parts) == 1 and packs():
            rounded = None if bias is None else bias.to(BF16)  # what this one insists on
            done: Tensor = _linear().binary(x, other, self._parts[0], rounded, "mul")
            return done
        return self(x, bias).mul_(other)


def rounded(weight: Weight, read: ReadInto) -> Tensor:
    """A weight in bf16."""
    out = torch.empty(weight.shape, dtype=BF16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # pieces are so small that a second one would mostly be waited for
    try:
        for a, b, part in slices(weight, read):
            out[a:b].copy_(torch.from_numpy(part))
    finally:
        torch.set_num_threads(threads)
    return out


# --- oneDNN's packed products. They are torch's own inner interface: where it lacks one, plain products do.

_packs: bool | None = None


def packs() -> bool:
    """Whether torch packs bf16 weights here, and gets right products out of them: tried once."""
    global _packs
    if _packs is None:
        _packs = _try()
    return _packs


def _try() -> bool:
    x, w, bias = (
        torch.eye(TILE, dtype=BF16),
        torch.arange(TILE * TILE).view(TILE, TILE).bfloat16(),
        torch.ones(TILE),
    )
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(w, None)
        found = [
            _linear()(x, packed, bias, "none", [], ""),
            _linear()(x, packed, None, "swish", [], ""),
            _linear().binary(x, x, packed, bias.to(BF16), "mul"),
        ]
    except (AttributeError, RuntimeError, TypeError):
        return False
    exact = [w.t() + bias.bfloat16(), torch.nn.functional.silu(w.t()), x * (w.t() + bias.bfloat16())]
    return all(torch.allclose(a.float(), b.float(), rtol=0.02) for a, b in zip(found, exact, strict=True))


def _linear() -> Any:  # noqa: ANN401 - torch's operators have no types
    return torch.ops.mkldnn._linear_pointwise


def pack(weight: Tensor) -> Tensor:
    """A bf16 weight in the layout that products read."""
    if not packs():
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, act: Activation = "none") -> Tensor:
    """x times a weight as `pack` gave it."""
    if not packs():
        return activate(torch.nn.functional.linear(x, weight, None if bias is None else bias.to(BF16)), act)
    name, algorithm = _ALGORITHMS.get(act, (act, ""))
    out: Tensor = _linear()(x, weight, bias, name, [], algorithm)
    return out


def _less(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """x times a weight as `pack` gave it, less y."""
    if not packs():
        return torch.addmm(-y, x, weight.t())
    out: Tensor = _linear().binary(x, -y, weight, None, "add")
    return out


def activate(x: Tensor, act: Activation) -> Tensor:
    """An activation by itself; it may take x's memory."""
    match act:
        case "swish":
            return torch.nn.functional.silu(x)
        case "relu":
            return torch.relu(x)
        case "gelu" | "gelu-tanh":
            return torch.nn.functional.gelu(x, approximate="tanh" if act == "gelu-tanh" else "none")
    return x


# --- without a second copy


class UnpackScratch:
    """Memory that all products of a lean backend unpack their weights into, one after the other."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` is called between slices; it raises after a cancellation."""
        self.check = check
        self._floats = np.empty(0, np.float32)
        self._rounded = torch.empty(0, dtype=BF16)

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return int(self._floats.nbytes + self._rounded.nbytes)

    def unpack(self, quant: QuantType, raw: Bytes, cols: int) -> Tensor:
        """Stored rows as bf16, good until the next call."""
        size = len(raw) * cols
        if self._rounded.numel() < size:
            self._rounded = torch.empty(size, dtype=BF16)
        step = max(1, IN_CACHE // cols)
        if self._floats.size < step * cols:
            self._floats = np.empty(step * cols, np.float32)
        out = self._rounded[:size].view(len(raw), cols)
        for a, b in spans(len(raw), step):
            part = self._floats[: (b - a) * cols].reshape(b - a, cols)
            dequantise(quant, raw[a:b], part)
            out[a:b].copy_(torch.from_numpy(part))
        return out


LEAN_AT_ONCE = 8 << 20  # weights that are bf16 at one time


class LeanProduct:
    """A weight as it is stored."""

    def __init__(self, weight: Weight, read: ReadInto, scratch: UnpackScratch) -> None:
        self._raw = stored(weight, read)
        self._quant = weight.quant
        self._cols = weight.shape[1]
        self._scratch = scratch

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return int(self._raw.nbytes)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [n, k] in bf16 to [n, m]."""
        rows = len(self._raw)
        step = max(1, LEAN_AT_ONCE // self._cols)
        if step >= rows:
            return self._part(x, 0, rows, bias)
        out = torch.empty((len(x), rows), dtype=BF16)
        for a, b in spans(rows, step):
            self._scratch.check()
            out[:, a:b] = self._part(x, a, b, None if bias is None else bias[a:b])
        return out

    def precise(self, x: Tensor) -> Tensor:
        """x [n, k] in bf16 to float32 [n, m]: see PackedProduct."""
        out = torch.empty(len(x), len(self._raw))
        for a, b in spans(len(self._raw), max(1, LEAN_AT_ONCE // self._cols)):
            self._scratch.check()
            weight = self._scratch.unpack(self._quant, self._raw[a:b], self._cols)
            y = torch.nn.functional.linear(x, weight)
            torch.add(y.float(), torch.addmm(-y, x, weight.t()), out=out[:, a:b])
        return out

    def _part(self, x: Tensor, a: int, b: int, bias: Tensor | None) -> Tensor:
        weight = self._scratch.unpack(self._quant, self._raw[a:b], self._cols)
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(BF16))
