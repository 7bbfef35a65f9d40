"""How each op kind is written as ggml nodes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hetrun.backend import Buffers, Floats, PassShape, WeightUse
from hetrun.backend.fusion import Rotation
from hetrun.backends.llamacpp import (
    decode_attention,
    ggml_api,
    packed_matmul,
    page_in,
)
from hetrun.backends.llamacpp.attention import attention
from hetrun.backends.llamacpp.delta_net import causal_conv, delta_net
from hetrun.backends.llamacpp.fusion import Fused, StackedProduct, uses
from hetrun.backends.llamacpp.graph_builder import FLOAT, TensorRef, Writer
from hetrun.backends.llamacpp.inputs import Inputs
from hetrun.backends.llamacpp.mapped_weights import MappedBuffer, MappedPages
from hetrun.backends.llamacpp.mixture import row_products
from hetrun.backends.llamacpp.moe import moe
from hetrun.backends.llamacpp.weight_memory import PACKED, GgmlBuffer
from hetrun.errors import BackendError
from hetrun.graph import Op, Rows, Value, Weight
from hetrun.graph.ops import (
    EverySecond,
    Gelu,
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
    from hetrun.backends.llamacpp.backend import LlamacppBackend


class GgmlEmitter:
    """Writes the ops of one segment."""

    def __init__(
        self, writer: Writer, buffers: Buffers, kv: KvCache, backend: LlamacppBackend, ops: Sequence[Op]
    ) -> None:
        self._ops = ops
        self.w = writer
        self.lib = writer.lib
        self.ctx = writer.context
        self.shape = writer.shape
        self.inputs = Inputs()
        self.values: dict[Value, TensorRef] = {}
        self._buffers = buffers
        self.kv = kv
        self.threads, self.slots = backend.threads, backend.slots
        self.kernels, self.products, self.sorter = backend.kernels, backend.products, backend.sorter
        self.delta_nets = backend.delta_nets
        self.exact = backend.exact
        self._partial, self.cached = backend.partial(), backend.experts()
        self.gathered: dict[tuple[int, int, int], TensorRef] = {}
        # Row numbers are the same for both kinds of rows when every token is wanted.
        self._all_wanted = self.shape.wanted == self.shape.tokens

    def count(self, rows: Rows) -> int:
        """How many rows of a kind this pass has."""
        return self.shape.tokens if rows == "tokens" else self.shape.wanted

    def read(self, value: Value) -> None:
        """A value that another segment made."""
        ref = self.w.matrix(value.width, self.count(value.rows))
        self.inputs.values[value.name] = ref
        self.values[value] = ref

    def emit(self, item: Fused) -> None:
        """Write one op, or several that were fused."""
        if isinstance(item, StackedProduct):
            self._product(item)
        elif isinstance(item, Rotation):
            self._rotation(item)
        else:
            EMIT[item.kind](self, item)

    def weights(self, item: Fused) -> list[int]:
        """The weights of one op, or of several that were fused."""
        return [self._buffer(use).tensor for use in uses(item)]

    def mapped(self, use: WeightUse) -> MappedPages | None:
        """What brings a weight into memory before its product, if it has to be brought."""
        buffer = self._buffer(use)
        return buffer.mapped if isinstance(buffer, MappedBuffer) else None

    def layout(self, use: WeightUse) -> str:
        """How a weight lies in memory."""
        return self._buffer(use).layout

    def _buffer(self, use: WeightUse) -> GgmlBuffer:
        buffer = self._buffers[use]
        if not isinstance(buffer, GgmlBuffer):
            raise BackendError(f"{use.weight.name} was loaded by another backend")
        return buffer

    def next_mixture(self, op: Op) -> Op | None:
        """The mixture that comes after one, if there is one."""
        behind = itertools.dropwhile(lambda o: o is not op, self._ops)
        return next((o for o in behind if o is not op and isinstance(o.attrs, Moe)), None)

    def gain(self, value: Value) -> Floats | None:
        """What a norm has multiplied the columns of a value by, if it was made by one."""
        made = next((o for o in self._ops if o.out is value), None)
        if made is None or made.kind != "rms_norm":
            return None
        fields = ggml_api.tensor_at(self.weights(made)[0])
        memory = (ctypes.c_float * value.width).from_address(fields.data)
        return np.ctypeslib.as_array(memory)

    def partial_address(self, weight: Weight) -> int | None:
        """Of what products know of a weight that is not always in memory as a whole."""
        found = self._partial.of(weight) if self._partial else None
        return found.address if found else None

    def row_source(self, weight: Weight) -> tuple[int, int, int] | None:
        """Where single rows of a table are read, if it is not in memory."""
        return self._partial.row_source(weight) if self._partial else None

    def define(self, op: Op, tensor: int) -> None:
        """The result of an op, as ggml allocates it."""
        self.values[op.out] = self.w.result(tensor, op.out.width, self.count(op.out.rows))

    def positions(self, rows: Rows, offset: int = 0, axis: int | None = None) -> int:
        """Positions of a kind of rows: in their sequences, with what is added to each, or along an axis."""
        key = ("tokens" if self._all_wanted else rows, offset, axis)
        if key not in self.inputs.positions:
            self.inputs.positions[key] = self.w.input(ggml_api.I32, self.count(key[0]))
        return self.inputs.positions[key]

    def look_up(self, op: Op, ids: int) -> None:
        """Rows of an op's table."""
        (use,) = uses(op)
        table = self._buffer(use)
        if table.layout == PACKED:
            self.define(op, packed_matmul.look_up(self, op, table.tensor, ids))
        else:
            self.define(op, self.lib.ggml_get_rows(self.ctx, table.tensor, ids))

    def _product(self, item: StackedProduct) -> None:
        weight, *bias = self.weights(item)
        if self._buffer(item.use).layout == PACKED:
            result = packed_matmul.multiply(self, item, weight, bias)
            self._slices([item.last] if item.gate or item.sum else item.ops, result)
            return
        x = self.values[item.input]
        rows = self.w.plain(x)
        if mapped := self.mapped(item.use):
            rows = page_in.bring_weight(self, mapped, item.use, rows)
        tensor = self.lib.ggml_mul_mat(self.ctx, weight, rows)
        if bias:
            tensor = self.lib.ggml_add(self.ctx, tensor, bias[0])
        self._slices(item.ops, self.w.result(tensor, item.weight.shape[0], x.rows))

    def _rotation(self, item: Rotation) -> None:
        first = item.ops[0]
        a = first.attrs
        assert isinstance(a, Rope)
        x = self.values[first.inputs[0]]
        width = sum(op.out.width for op in item.ops)
        joined = replace(x, width=width)
        mode = ggml_api.ROPE_INTERLEAVED if a.interleaved else ggml_api.ROPE_HALVES
        factors = self.weights(item)[0] if first.weights else None
        tensor = self.lib.ggml_rope_ext(
            self.ctx, self.w.heads(joined, a.head_dim), self.positions(first.rows, axis=a.axis), factors,
            a.n_rot, mode,
            a.n_ctx_orig,
            a.base, a.freq_scale, a.ext_factor, a.attn_factor, a.beta_fast, a.beta_slow,
        )  # fmt: skip
        y = self.w.result(self.lib.ggml_reshape_2d(self.ctx, tensor, width, x.rows), width, x.rows)
        self._slices(item.ops, y)

    def growth(self, rows: Rows, a: Grow) -> int:
        """By what each row is multiplied, [1, rows]."""
        key = "tokens" if self._all_wanted else rows, a
        if key not in self.inputs.growth:
            self.inputs.growth[key] = self.w.input(ggml_api.F32, self.count(key[0]))
        found: int = self.lib.ggml_reshape_2d(self.ctx, self.inputs.growth[key], 1, self.count(key[0]))
        return found

    def _slices(self, ops: Sequence[Op], joined: TensorRef) -> None:
        """The results of several ops, next to each other in one."""
        column = 0
        for op in ops:
            self.values[op.out] = joined.columns(column, column + op.out.width)
            column += op.out.width


def _embed(e: GgmlEmitter, op: Op) -> None:
    if not e.inputs.tokens:
        e.inputs.tokens = e.w.input(ggml_api.I32, e.shape.tokens)
    e.look_up(op, e.inputs.tokens)


def _positions(e: GgmlEmitter, op: Op) -> None:
    assert isinstance(op.attrs, Positions)
    e.look_up(op, e.positions("tokens", op.attrs.offset))


def _rms_norm(e: GgmlEmitter, op: Op) -> None:
    a = op.attrs
    assert isinstance(a, RmsNorm)
    x = e.values[op.inputs[0]]
    rows = e.w.plain(x) if a.heads == 1 else e.w.heads(x, x.width // a.heads)
    # ggml runs a norm and the product right behind it as one.
    tensor = e.lib.ggml_mul(e.ctx, e.lib.ggml_rms_norm(e.ctx, rows, a.eps), *e.weights(op))
    e.define(op, tensor if a.heads == 1 else e.lib.ggml_reshape_2d(e.ctx, tensor, x.width, x.rows))


def _layer_norm(e: GgmlEmitter, op: Op) -> None:
    assert isinstance(op.attrs, LayerNorm)
    tensor = e.lib.ggml_norm(e.ctx, e.w.plain(e.values[op.inputs[0]]), op.attrs.eps)
    for apply, weight in zip((e.lib.ggml_mul, e.lib.ggml_add), e.weights(op), strict=False):
        tensor = apply(e.ctx, tensor, weight)
    e.define(op, tensor)


def _select(e: GgmlEmitter, op: Op) -> None:
    x = e.values[op.inputs[0]]
    if e.shape.wanted == e.shape.tokens:
        e.values[op.out] = x
        return
    if not e.inputs.wanted:
        e.inputs.wanted = e.w.input(ggml_api.I32, e.shape.wanted)
    e.define(op, e.lib.ggml_get_rows(e.ctx, e.w.plain(x), e.inputs.wanted))


def _gated(e: GgmlEmitter, op: Op) -> None:
    kind = "geglu_erf" if isinstance(op.attrs, Gelu) and op.attrs.exact else op.kind
    gate, up = (e.values[v] for v in op.inputs)
    halves = gate.tensor == up.tensor and up.offset == gate.offset + gate.width * 4
    if halves and gate.offset == 0 and gate.stride == 2 * gate.width * 4:
        e.define(op, getattr(e.lib, f"ggml_{kind}")(e.ctx, gate.tensor))
    else:
        e.define(op, getattr(e.lib, f"ggml_{kind}_split")(e.ctx, e.w.plain(gate), e.w.plain(up)))


def _sigmoid_gate(e: GgmlEmitter, op: Op) -> None:
    gate, x = (e.w.plain(e.values[v]) for v in op.inputs)
    e.define(op, e.lib.ggml_mul(e.ctx, x, e.lib.ggml_sigmoid(e.ctx, gate)))


def _multiply(e: GgmlEmitter, op: Op) -> None:
    e.define(op, e.lib.ggml_mul(e.ctx, *(e.w.plain(e.values[v]) for v in op.inputs)))


def _gelu(e: GgmlEmitter, op: Op) -> None:
    assert isinstance(op.attrs, Gelu)
    gelu = e.lib.ggml_gelu_erf if op.attrs.exact else e.lib.ggml_gelu
    e.define(op, gelu(e.ctx, e.w.plain(e.values[op.inputs[0]])))


def _relu(e: GgmlEmitter, op: Op) -> None:
    e.define(op, e.lib.ggml_relu(e.ctx, e.w.plain(e.values[op.inputs[0]])))


def _scale(e: GgmlEmitter, op: Op) -> None:
    assert isinstance(op.attrs, Scale)
    x = e.w.plain(e.values[op.inputs[0]])
    for weight in e.weights(op):
        x = e.lib.ggml_mul(e.ctx, x, weight)
    e.define(op, x if op.weights and op.attrs.factor == 1 else e.lib.ggml_scale(e.ctx, x, op.attrs.factor))


def _grow(e: GgmlEmitter, op: Op) -> None:
    assert isinstance(op.attrs, Grow)
    rows = e.w.plain(e.values[op.inputs[0]])
    e.define(op, e.lib.ggml_mul(e.ctx, rows, e.growth(op.rows, op.attrs)))


def _softcap(e: GgmlEmitter, op: Op) -> None:
    assert isinstance(op.attrs, Softcap)
    cap = op.attrs.cap
    small = e.lib.ggml_scale(e.ctx, e.w.plain(e.values[op.inputs[0]]), 1 / cap)
    e.define(op, e.lib.ggml_scale(e.ctx, e.lib.ggml_tanh(e.ctx, small), cap))


def _add(e: GgmlEmitter, op: Op) -> None:
    a, b = (e.w.plain(e.values[v]) for v in op.inputs)
    e.define(op, e.lib.ggml_add(e.ctx, a, b))


def _concat(e: GgmlEmitter, op: Op) -> None:
    first, *others = (e.w.plain(e.values[v]) for v in op.inputs)
    for other in others:
        first = e.lib.ggml_concat(e.ctx, first, other, 0)
    e.define(op, first)


def _every_second(e: GgmlEmitter, op: Op) -> None:
    a = op.attrs
    assert isinstance(a, EverySecond)
    x, width = e.values[op.inputs[0]], op.out.width // a.heads
    skip, step = x.offset + a.first * width * FLOAT, 2 * width * FLOAT
    slices = e.lib.ggml_view_3d(e.ctx, x.tensor, width, a.heads, x.rows, step, x.stride, skip)
    e.define(op, e.lib.ggml_reshape_2d(e.ctx, e.lib.ggml_cont(e.ctx, slices), op.out.width, x.rows))


def _per_head(e: GgmlEmitter, op: Op) -> None:
    a, (rows, cols) = op.attrs, op.weights[0].shape
    assert isinstance(a, PerHead)
    lib, ctx, x = e.lib, e.ctx, e.values[op.inputs[0]]
    head, n_out = x.width // a.heads, rows // a.heads
    (weight,) = e.weights(op)
    matrices = lib.ggml_reshape_3d(ctx, weight, cols, n_out, a.heads)

    def columns(first: int, n: int) -> int:
        skip = x.offset + first * FLOAT
        made: int = lib.ggml_view_3d(ctx, x.tensor, n, a.heads, x.rows, head * FLOAT, x.stride, skip)
        return made

    made = row_products.multiply_heads(e, matrices, columns(a.first, cols))
    if a.passed and (left := head - a.first - cols):
        made = lib.ggml_concat(ctx, columns(a.first + cols, left), made, 0)
    else:
        made = lib.ggml_cont(ctx, made)
    e.define(op, lib.ggml_reshape_2d(ctx, made, op.out.width, x.rows))


EMIT: Mapping[str, Callable[[GgmlEmitter, Op], None]] = {
    "embed": _embed,
    "positions": _positions,
    "per_head": _per_head,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "attention": attention,
    "causal_conv": causal_conv,
    "delta_net": delta_net,
    "moe": moe,
    "select": _select,
    "swiglu": _gated,
    "geglu": _gated,
    "sigmoid_gate": _sigmoid_gate,
    "multiply": _multiply,
    "gelu": _gelu,
    "relu": _relu,
    "scale": _scale,
    "grow": _grow,
    "softcap": _softcap,
    "add": _add,
    "concat": _concat,
    "every_second": _every_second,
}
KINDS = frozenset(EMIT) | {"linear", "head", "rope"}

# The most tensors, views included, that an op is written as; attention once more for each sequence.
TENSORS_PER_OP = 6
MORE_TENSORS = {"attention": 20, "moe": 36, "per_head": 4}


def most_tensors(ops: Sequence[Op], shape: PassShape) -> int:
    """What a graph of these ops needs room for."""
    pieces = sum(
        tokens // decode_attention.MOST_ROWS for tokens, _ in shape.parts
    )  # a node each, and its queries
    more = MORE_TENSORS | {"attention": MORE_TENSORS["attention"] * len(shape.parts) + 2 * pieces}
    counts = (more.get(op.kind, 0) + TENSORS_PER_OP + 2 * len(op.inputs) for op in ops)
    return 64 + sum(counts)
