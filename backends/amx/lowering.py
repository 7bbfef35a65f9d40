"""How each op is written as a call of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hetrun.backend import Buffer, Buffers, Pass, PassShape, Segment
from hetrun.backend.fusion import GatedProduct, Rotation, dataflow, has_token_rows
from hetrun.backend.op_profile import Activity, activity
from hetrun.backends.amx import elementwise, fusion
from hetrun.backends.amx.attention import attend
from hetrun.backends.amx.bf16_matmul import BF16, Bf16Product, LeanProduct, PackedProduct, activate
from hetrun.backends.amx.buffers import AmxExpertProducts, held_as, inside_of, product_of, vector_of
from hetrun.backends.amx.causal_conv import causal_conv, taps_of
from hetrun.backends.amx.delta_net import Gates, delta_net
from hetrun.backends.amx.elementwise import Angles
from hetrun.backends.amx.fusion import ActivatedLinear, Fused, StackedLinear
from hetrun.backends.amx.moe import AmxMixture, moe
from hetrun.backends.amx.sizes import TILE
from hetrun.backends.amx.weight_slices import StoredRows, spans
from hetrun.graph import Op, Rows, Value, Weight
from hetrun.graph.ops import (
    MIXTURE,
    DeltaNet,
    EverySecond,
    Grow,
    LayerNorm,
    Moe,
    PerHead,
    Positions,
    RmsNorm,
    Rope,
    Scale,
    Softcap,
)
from hetrun.memory.kv.cache import KvCache

if TYPE_CHECKING:
    from hetrun.backends.amx.backend import AmxBackend

# A call of oneDNN cannot be interrupted: what would take longer is cut by rows. Being wrong by two about the
# rate costs nothing but a later cancel, or some copying.
LONGEST_CALL = 0.040  # seconds
FLOPS_PER_THREAD = {"bf16": 200e9, "int8": 400e9}
FEWEST_ROWS = 64  # products of fewer rows are far from the peak


@dataclass(slots=True)
class SegmentFrame:
    """One trip through a segment."""

    work: Pass
    values: list[Tensor | None]
    angles: Angles = field(default_factory=Angles)

    def get(self, slot: int) -> Tensor:
        """A value that was made."""
        value = self.values[slot]
        assert value is not None
        return value


Call = Callable[[SegmentFrame], None]


def most_rows(weights: int, threads: int, arithmetic: str) -> int:
    """The most rows that one call may multiply by this many weights."""
    rate = FLOPS_PER_THREAD[arithmetic] * threads
    return max(FEWEST_ROWS, int(LONGEST_CALL * rate / (2 * weights)) // TILE * TILE)


class AmxEmitter:
    """Writes the calls of a segment."""

    def __init__(
        self, backend: AmxBackend, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache
    ) -> None:
        self._backend = backend
        self._buffers = buffers
        self._kv = kv
        self._kept = frozenset(segment.writes)
        self._foreign = frozenset(segment.reads)
        self._flow = dataflow(segment.ops)
        values = dict.fromkeys((*segment.reads, *(v for op in segment.ops for v in (*op.inputs, op.out))))
        self.slots: Mapping[Value, int] = {v: i for i, v in enumerate(values)}
        items = [
            item
            for item in fusion.fuse(segment.ops, segment.writes, backend.inside)
            if shape.wanted or has_token_rows(fusion.members(item))
        ]
        self._last = {v: i for i, item in enumerate(items) for op in fusion.members(item) for v in op.inputs}
        self.calls: list[tuple[Activity, Call, tuple[int, ...]]] = []
        for at, item in enumerate(items):
            self._at = at
            dead = [v for v, last in self._last.items() if last == at and v not in self._kept]
            kind = activity(fusion.members(item)[0].kind)
            self.calls.append((kind, self._call(item), tuple(self.slots[v] for v in dead)))

    def _call(self, item: Fused) -> Call:
        match item:
            case StackedLinear():
                return self._stacked(item)
            case ActivatedLinear():
                return self._activated(item)
            case GatedProduct():
                return self._gated(item)
            case Rotation():
                return self._rotation(item)
        return _EMIT[item.kind](self, item)

    # --- what calls are made of

    def slot(self, value: Value) -> int:
        """Where a value lies."""
        return self.slots[value]

    def buffers(self, item: Fused) -> list[Buffer]:
        """The weights of an item, in the order of `fusion.uses`."""
        return [self._buffers[use] for use in fusion.uses(item)]

    def is_spent(self, value: Value) -> bool:
        """Whether the item being written is the last to read a value that is ours to overwrite."""
        return self._last.get(value) == self._at and value not in self._kept and value not in self._foreign

    def is_rounded(self, value: Value) -> bool:
        """Whether only products read a value, so that it may be bf16."""
        return value not in self._kept and all(
            self.is_rounded(op.out) if op.kind == "select" else op.kind in ("linear", "head")
            for op in self._flow.readers(value)
        )

    def cut(self, function: Callable[[Tensor], Tensor], weight: Weight) -> Callable[[Tensor], Tensor]:
        """A product with x in bf16, some rows of it at a time if all would take long."""
        backend, weights = self._backend, weight.shape[0] * weight.shape[1]

        def whole(x: Tensor) -> Tensor:
            x, most = x.to(BF16), most_rows(weights, backend.threads, backend.arithmetic)
            if len(x) <= most:
                return function(x)
            step = -(-len(x) // -(-len(x) // most))
            pieces = []
            for a, b in spans(len(x), -(-step // TILE) * TILE):
                backend.check()
                pieces.append(function(x[a:b]))
            return torch.cat(pieces)

        return whole

    # --- what is fused

    def _stacked(self, item: StackedLinear) -> Call:
        weight, *biases = self.buffers(item)
        product, bias = product_of(weight), _joined_bias(item, biases)
        function = _precise(product, bias) if item.ops[0].kind == "head" else None
        multiply = self.cut(function or (lambda x: product(x, bias)), item.weight)
        source = self.slot(item.ops[0].inputs[0])
        targets = [self.slot(op.out) for op in item.ops]
        widths = [op.out.width for op in item.ops]
        if len(targets) == 1:
            target = targets[0]

            def one(frame: SegmentFrame) -> None:
                frame.values[target] = multiply(frame.get(source))

            return one

        def several(frame: SegmentFrame) -> None:
            for target, part in zip(
                targets, torch.split(multiply(frame.get(source)), widths, 1), strict=True
            ):
                frame.values[target] = part

        return several

    def _activated(self, item: ActivatedLinear) -> Call:
        weight, *biases = self.buffers(item)
        bias = vector_of(biases[0])[0] if biases else None
        product = inside_of(weight)
        act = elementwise.activation(item.act)
        run = self.cut(lambda x: product(x, bias, act), item.linear.weights[0])
        return self._unary(item.linear.inputs[0], item.act.out, run)

    def _gated(self, item: GatedProduct) -> Call:
        (gate, *gate_bias), (up, *up_bias) = (
            [self._buffers[use] for use in fusion.uses(StackedLinear((op,), op.weights[0]))]
            for op in (item.gate, item.up)
        )
        one, other = inside_of(gate), inside_of(up)
        first, second = (vector_of(b[0])[0] if b else None for b in (gate_bias, up_bias))
        act = elementwise.activation(item.act)
        run = self.cut(lambda x: one.gated(other, x, act, (first, second)), item.gate.weights[0])
        return self._unary(item.gate.inputs[0], item.act.out, run)

    def _rotation(self, item: Rotation) -> Call:
        first = item.ops[0]
        a = first.attrs
        assert isinstance(a, Rope)
        factors = vector_of(self.buffers(item)[0]) if first.weights else None
        sources = [self.slot(op.inputs[0]) for op in item.ops]
        targets = [self.slot(op.out) for op in item.ops]
        heads = [_heads(op) for op in item.ops]
        rounded = [self._is_query(op.out) for op in item.ops]
        kind: Rows = first.rows

        def call(frame: SegmentFrame) -> None:
            turn = frame.angles.of(a, frame.work.along(a.axis, kind), kind, factors)
            parts = [frame.get(s) for s in sources]
            joined = parts[0] if len(parts) == 1 else _neighbours(parts)
            turned = torch.split(elementwise.rope(a, joined, turn), heads, 1)
            for target, part, in_bf16 in zip(targets, turned, rounded, strict=True):
                frame.values[target] = (part.to(BF16) if in_bf16 else part).flatten(1)

        return call

    def _is_query(self, value: Value) -> bool:
        """Whether only attention reads a value, as its query: bf16 is what it multiplies."""
        readers = self._flow.readers(value)
        return value not in self._kept and all(
            op.kind == "attention" and op.inputs[0] == value for op in readers
        )

    def _unary(self, source: Value, target: Value, function: Callable[[Tensor], Tensor]) -> Call:
        """A function of one value."""
        a, b = self.slot(source), self.slot(target)

        def call(frame: SegmentFrame) -> None:
            frame.values[b] = function(frame.get(a))

        return call

    # --- the other ops

    def unary(self, op: Op, function: Callable[[Tensor], Tensor]) -> Call:
        """An op that makes one value of another."""
        return self._unary(op.inputs[0], op.out, function)

    def lookup(self, op: Op) -> Call:
        """Rows of a table."""
        table, target = held_as(self.buffers(op)[0], StoredRows), self.slot(op.out)
        offset = op.attrs.offset if isinstance(op.attrs, Positions) else None

        def call(frame: SegmentFrame) -> None:
            index = frame.work.tokens if offset is None else frame.work.positions + offset
            frame.values[target] = torch.from_numpy(table.rows(index))

        return call

    def select(self, op: Op) -> Call:
        source, target = self.slot(op.inputs[0]), self.slot(op.out)

        def call(frame: SegmentFrame) -> None:
            frame.values[target] = frame.get(source)[torch.from_numpy(frame.work.wanted)]

        return call

    def add(self, op: Op) -> Call:
        first, second, target = self.slot(op.inputs[0]), self.slot(op.inputs[1]), self.slot(op.out)
        in_place = self.is_spent(op.inputs[0])

        def call(frame: SegmentFrame) -> None:
            x, y = frame.get(first), frame.get(second)
            # Converted before it is added: a sum of two types takes half as long again.
            if in_place and x.dtype == torch.float32:
                frame.values[target] = x.add_(y.float())
            else:
                frame.values[target] = x.float() + y.float()

        return call

    def concat(self, op: Op) -> Call:
        sources, target = [self.slot(v) for v in op.inputs], self.slot(op.out)

        def call(frame: SegmentFrame) -> None:
            frame.values[target] = torch.cat([frame.get(s) for s in sources], 1)

        return call

    def gate(self, op: Op) -> Call:
        first, second, target = self.slot(op.inputs[0]), self.slot(op.inputs[1]), self.slot(op.out)
        act = elementwise.activation(op)

        def call(frame: SegmentFrame) -> None:
            frame.values[target] = activate(frame.get(first), act) * frame.get(second)

        return call

    def sigmoid_gate(self, op: Op) -> Call:
        first, second, target = self.slot(op.inputs[0]), self.slot(op.inputs[1]), self.slot(op.out)

        def call(frame: SegmentFrame) -> None:
            frame.values[target] = torch.sigmoid(frame.get(first).float()) * frame.get(second)

        return call

    def multiply(self, op: Op) -> Call:
        first, second, target = self.slot(op.inputs[0]), self.slot(op.inputs[1]), self.slot(op.out)

        def call(frame: SegmentFrame) -> None:
            frame.values[target] = frame.get(first).float() * frame.get(second)

        return call

    def attention(self, op: Op) -> Call:
        q, *own = (self.slot(value) for value in op.inputs)
        target, kv, scratch = self.slot(op.out), self._kv, self._backend.attention_scratch
        width, sinks = op.inputs[0].width, next(map(vector_of, self.buffers(op)), None)

        def call(frame: SegmentFrame) -> None:
            query = frame.values[q]
            if query is None:  # no row of this pass is wanted: it only fills the cache
                query = torch.empty((0, width), dtype=BF16)
            frame.values[target] = attend(
                op, query, [frame.get(x) for x in own], sinks, frame.work, kv, scratch
            )

        return call

    def causal_conv(self, op: Op) -> Call:
        source, target, kv = self.slot(op.inputs[0]), self.slot(op.out), self._kv
        kernel, *more = map(vector_of, self.buffers(op))
        taps, bias = taps_of(kernel), next((b[:, 0] for b in more), None)

        def call(frame: SegmentFrame) -> None:
            frame.values[target] = causal_conv(op, frame.get(source), taps, bias, frame.work, kv)

        return call

    def delta_net(self, op: Op) -> Call:
        x, decay, rate = (self.slot(value) for value in op.inputs)
        target, kv, check = self.slot(op.out), self._kv, self._backend.check
        assert isinstance(op.attrs, DeltaNet)
        gates = Gates(op.attrs, *(vector_of(b)[0] for b in self.buffers(op)))

        def call(frame: SegmentFrame) -> None:
            given = frame.get(x), frame.get(decay), frame.get(rate)
            frame.values[target] = delta_net(op, given, gates, frame.work, kv, check)

        return call

    def moe(self, op: Op) -> Call:
        a = op.attrs
        assert isinstance(a, Moe)
        found = self.buffers(op)
        gates, ups, downs = (held_as(b, AmxExpertProducts) for b in found[1:MIXTURE])
        more = {name: vector_of(b) for name, b in a.others(found).items()}
        mixture = AmxMixture(a, vector_of(found[0]), gates, ups, downs, more)
        check = self._backend.check
        source, looked_at, target = self.slot(op.inputs[0]), self.slot(op.inputs[-1]), self.slot(op.out)

        def call(frame: SegmentFrame) -> None:
            x = frame.get(source).float()
            seen = x if source == looked_at else frame.get(looked_at).float()
            frame.values[target] = moe(mixture, x, seen, check)

        return call

    def rms_norm(self, op: Op) -> Call:
        a, gain, rounded = op.attrs, vector_of(self.buffers(op)[0]), self.is_rounded(op.out)
        assert isinstance(a, RmsNorm)
        return self.unary(op, lambda x: elementwise.rms_norm(a, x, gain[0], rounded))

    def layer_norm(self, op: Op) -> Call:
        a, rounded = op.attrs, self.is_rounded(op.out)
        assert isinstance(a, LayerNorm)
        vectors = [vector_of(b)[0] for b in self.buffers(op)]
        gain, bias = (*vectors, None, None)[:2]
        return self.unary(op, lambda x: elementwise.layer_norm(a, x, gain, bias, rounded))


def _scale(e: AmxEmitter, op: Op) -> Call:
    assert isinstance(op.attrs, Scale)
    factor = op.attrs.factor
    for weight in e.buffers(op):
        factor *= float(vector_of(weight)[0, 0])
    return e.unary(op, lambda x: x.float() * factor)


def _grow(e: AmxEmitter, op: Op) -> Call:
    a, source, target = op.attrs, e.slot(op.inputs[0]), e.slot(op.out)
    assert isinstance(a, Grow)

    def call(frame: SegmentFrame) -> None:
        growth = a.growth(frame.work.along(0, op.rows))
        frame.values[target] = frame.get(source).float() * torch.from_numpy(growth)[:, None]

    return call


def _softcap(e: AmxEmitter, op: Op) -> Call:
    assert isinstance(op.attrs, Softcap)
    cap = op.attrs.cap
    return e.unary(op, lambda x: torch.div(x.float(), cap).tanh_().mul_(cap))


def _every_second(e: AmxEmitter, op: Op) -> Call:
    a = op.attrs
    assert isinstance(a, EverySecond)
    heads, first, width = a.heads, a.first, op.out.width
    return e.unary(op, lambda x: x.view(len(x), heads, 2, width // heads)[:, :, first].reshape(len(x), width))


def _act(e: AmxEmitter, op: Op) -> Call:
    act = elementwise.activation(op)
    return e.unary(op, lambda x: activate(x, act))


def _per_head(e: AmxEmitter, op: Op) -> Call:
    a, (rows, cols) = op.attrs, op.weights[0].shape
    assert isinstance(a, PerHead)
    heads, first, end, passed, width = a.heads, a.first, a.first + cols, a.passed, op.out.width
    matrices = vector_of(e.buffers(op)[0]).view(heads, rows // heads, cols).transpose(1, 2)

    def multiply(x: Tensor) -> Tensor:
        each = x.view(len(x), heads, x.shape[1] // heads)
        made = torch.bmm(each[:, :, first:end].to(BF16).transpose(0, 1), matrices).transpose(0, 1)
        if passed:
            made = torch.cat([each[:, :, end:], made.to(x.dtype)], 2)
        return made.reshape(len(x), width)

    return e.unary(op, multiply)


_EMIT: Mapping[str, Callable[[AmxEmitter, Op], Call]] = {
    "embed": AmxEmitter.lookup,
    "positions": AmxEmitter.lookup,
    "per_head": _per_head,
    "rms_norm": AmxEmitter.rms_norm,
    "layer_norm": AmxEmitter.layer_norm,
    "attention": AmxEmitter.attention,
    "causal_conv": AmxEmitter.causal_conv,
    "delta_net": AmxEmitter.delta_net,
    "moe": AmxEmitter.moe,
    "swiglu": AmxEmitter.gate,
    "geglu": AmxEmitter.gate,
    "sigmoid_gate": AmxEmitter.sigmoid_gate,
    "multiply": AmxEmitter.multiply,
    "gelu": _act,
    "relu": _act,
    "scale": _scale,
    "grow": _grow,
    "softcap": _softcap,
    "add": AmxEmitter.add,
    "concat": AmxEmitter.concat,
    "every_second": _every_second,
    "select": AmxEmitter.select,
}


def _precise(product: Bf16Product, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """A product in float32, where the way to hold it has such a thing."""
    if not isinstance(product, (PackedProduct, LeanProduct)):
        return None
    precise = product.precise
    return precise if bias is None else lambda x: precise(x).add_(bias)


def _heads(op: Op) -> int:
    assert isinstance(op.attrs, Rope)
    return op.attrs.n_heads


def _neighbours(parts: list[Tensor]) -> Tensor:
    """Slices of one product that lie next to each other, as one."""
    first = parts[0]
    width = sum(p.shape[1] for p in parts)
    return first.as_strided((len(first), width), first.stride())


def _joined_bias(item: StackedLinear, biases: list[Buffer]) -> Tensor | None:
    """The biases of stacked products; zeros for those without."""
    if not biases:
        return None
    left = iter(biases)
    return torch.cat(
        [vector_of(next(left))[0] if len(op.weights) > 1 else torch.zeros(op.out.width) for op in item.ops]
    )
