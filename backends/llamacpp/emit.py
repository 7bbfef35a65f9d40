"""How each op kind is written as ggml nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hetrun.backend import Buffers, WeightUse
from hetrun.backends.llamacpp import native
from hetrun.backends.llamacpp.attention import attention
from hetrun.backends.llamacpp.fusion import Fused, Product, Rotation
from hetrun.backends.llamacpp.inputs import Inputs
from hetrun.backends.llamacpp.memory import GgmlBuffer
from hetrun.backends.llamacpp.writer import Ref, Writer
from hetrun.errors import BackendError
from hetrun.graph import Op, Rows, Value, Weight
from hetrun.kv import KvCache
from hetrun.ops import RmsNorm, Rope


class Emitter:
    """Writes the ops of one segment."""

    def __init__(self, writer: Writer, buffers: Buffers, kv: KvCache) -> None:
        self.w = writer
        self.lib = writer.lib
        self.ctx = writer.context
        self.shape = writer.shape
        self.inputs = Inputs()
        self.values: dict[Value, Ref] = {}
        self._buffers = buffers
        self.kv = kv
        self.gathered: dict[tuple[int, int], Ref] = {}
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
        if isinstance(item, Product):
            self._product(item)
        elif isinstance(item, Rotation):
            self._rotation(item)
        else:
            EMIT[item.kind](self, item)

    def weight(self, weight: Weight, use: WeightUse) -> int:
        buffer = self._buffers[use]
        if not isinstance(buffer, GgmlBuffer):
            raise BackendError(f"{weight.name} was brought in by another backend")
        return buffer.tensor

    def vector(self, weight: Weight) -> int:
        """A gain, a bias or rope factors."""
        return self.weight(weight, WeightUse(weight, "vector"))

    def define(self, op: Op, tensor: int) -> None:
        """The result of an op, as ggml allocates it."""
        self.values[op.out] = self.w.result(tensor, op.out.width, self.count(op.out.rows))

    def positions(self, rows: Rows) -> int:
        """The positions of a kind of rows."""
        kind: Rows = "tokens" if self._all_wanted else rows
        if kind not in self.inputs.positions:
            self.inputs.positions[kind] = self.w.input(native.I32, self.count(kind))
        return self.inputs.positions[kind]

    def _product(self, item: Product) -> None:
        x = self.values[item.ops[0].inputs[0]]
        w = self.weight(item.weight, WeightUse(item.weight, "product"))
        y = self.w.result(self.lib.ggml_mul_mat(self.ctx, w, self.w.plain(x)), item.weight.shape[0], x.rows)
        column = 0
        for op in item.ops:
            ref = y.columns(column, column + op.out.width)
            column += op.out.width
            if len(op.weights) > 1:
                total = self.lib.ggml_add(self.ctx, self.w.plain(ref), self.vector(op.weights[1]))
                ref = self.w.result(total, ref.width, ref.rows)
            self.values[op.out] = ref

    def _rotation(self, item: Rotation) -> None:
        first = item.ops[0]
        a = first.attrs
        assert isinstance(a, Rope)
        x = self.values[first.inputs[0]]
        width = sum(op.out.width for op in item.ops)
        joined = replace(x, width=width)
        mode = native.ROPE_INTERLEAVED if a.interleaved else native.ROPE_HALVES
        factors = self.vector(first.weights[0]) if first.weights else None
        tensor = self.lib.ggml_rope_ext(
            self.ctx, self.w.heads(joined, a.head_dim), self.positions(first.rows), factors, a.n_rot, mode,
            a.n_ctx_orig,
            a.base, a.freq_scale, a.ext_factor, a.attn_factor, a.beta_fast, a.beta_slow,
        )  # fmt: skip
        y = self.w.result(self.lib.ggml_reshape_2d(self.ctx, tensor, width, x.rows), width, x.rows)
        column = 0
        for op in item.ops:
            self.values[op.out] = y.columns(column, column + op.out.width)
            column += op.out.width


def _embed(e: Emitter, op: Op) -> None:
    if not e.inputs.tokens:
        e.inputs.tokens = e.w.input(native.I32, e.shape.tokens)
    table = e.weight(op.weights[0], WeightUse(op.weights[0], "lookup"))
    e.define(op, e.lib.ggml_get_rows(e.ctx, table, e.inputs.tokens))


def _rms_norm(e: Emitter, op: Op) -> None:
    assert isinstance(op.attrs, RmsNorm)
    normed = e.lib.ggml_rms_norm(e.ctx, e.w.plain(e.values[op.inputs[0]]), op.attrs.eps)
    e.define(op, e.lib.ggml_mul(e.ctx, normed, e.vector(op.weights[0])))


def _select(e: Emitter, op: Op) -> None:
    x = e.values[op.inputs[0]]
    if e.shape.wanted == e.shape.tokens:
        e.values[op.out] = x
        return
    if not e.inputs.wanted:
        e.inputs.wanted = e.w.input(native.I32, e.shape.wanted)
    e.define(op, e.lib.ggml_get_rows(e.ctx, e.w.plain(x), e.inputs.wanted))


def _swiglu(e: Emitter, op: Op) -> None:
    gate, up = (e.values[v] for v in op.inputs)
    halves = gate.tensor == up.tensor and up.offset == gate.offset + gate.width * 4
    if halves and gate.offset == 0 and gate.stride == 2 * gate.width * 4:
        e.define(op, e.lib.ggml_swiglu(e.ctx, gate.tensor))
    else:
        e.define(op, e.lib.ggml_swiglu_split(e.ctx, e.w.plain(gate), e.w.plain(up)))


def _add(e: Emitter, op: Op) -> None:
    a, b = (e.w.plain(e.values[v]) for v in op.inputs)
    e.define(op, e.lib.ggml_add(e.ctx, a, b))


EMIT: Mapping[str, Callable[[Emitter, Op], None]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "attention": attention,
    "select": _select,
    "swiglu": _swiglu,
    "add": _add,
}
KINDS = frozenset(EMIT) | {"linear", "head", "rope"}
