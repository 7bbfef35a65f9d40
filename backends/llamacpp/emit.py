"""How each op kind is written as ggml nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from hetrun.backend import Buffers, WeightUse
from hetrun.backends.llamacpp import native
from hetrun.backends.llamacpp.fusion import Fused, Product, Rotation
from hetrun.backends.llamacpp.memory import GgmlBuffer
from hetrun.backends.llamacpp.writer import Ref, Writer
from hetrun.errors import BackendError
from hetrun.graph import Op, Rows, Value, Weight
from hetrun.kv import KvCache, KvTable
from hetrun.ops import Attention, RmsNorm, Rope


@dataclass(frozen=True, slots=True)
class KvSlice:
    """The window of a KV table that one sequence attends over: patched before each run."""

    tensor: int
    table: KvTable
    part: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Which rows of its window each token of a sequence sees: patched and filled before each run."""

    tensor: int
    part: int
    rows: Rows


@dataclass(slots=True)
class Inputs:
    """What a run has to fill in."""

    tokens: int = 0
    slots: int = 0
    wanted: int = 0
    positions: dict[Rows, int] = field(default_factory=dict)
    values: dict[str, Ref] = field(default_factory=dict)
    kv: list[KvSlice] = field(default_factory=list)
    masks: dict[tuple[int, Rows], Mask] = field(default_factory=dict)


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
        self._kv = kv
        self._gathered: dict[tuple[int, int], Ref] = {}
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

    def store(self, table: KvTable, x: Ref) -> None:
        """Write this pass's rows into a KV table."""
        if not self.inputs.slots:
            self.inputs.slots = self.w.input(native.I64, self.shape.tokens)
        width = table.n_heads * table.head_dim
        rows = self.w.external(table.quant.ggml_id, width, len(table.raw), table.address, table.row_bytes)
        self.w.expand(self.lib.ggml_set_rows(self.ctx, rows, self.w.plain(x), self.inputs.slots))

    def window(self, table: KvTable, part: int) -> int:
        """A KV table's rows of one sequence as [head_dim, rows, heads]."""
        head_bytes = table.quant.row_bytes(table.head_dim)
        base = self.w.external(
            table.quant.ggml_id, table.n_heads * table.head_dim, 1, self.w.anchor.ctypes.data
        )
        tensor: int = self.lib.ggml_view_3d(
            self.ctx, base, table.head_dim, 1, table.n_heads, head_bytes * table.n_heads, head_bytes, 0
        )
        native.tensor_at(tensor).nb[1] = table.row_bytes
        self.inputs.kv.append(KvSlice(tensor, table, part))
        return tensor

    def mask(self, part: int, rows: Rows) -> int | None:
        """The mask of one sequence; a single token at the end of one run of rows sees all of them."""
        tokens, wanted, contiguous = self.shape.parts[part]
        n = tokens if rows == "tokens" else wanted
        if tokens == 1 and contiguous:
            return None
        if (part, rows) not in self.inputs.masks:
            tensor = self.w.external(native.F16, 1, n, self.w.anchor.ctypes.data)
            self.inputs.masks[part, rows] = Mask(tensor, part, rows)
        return self.inputs.masks[part, rows].tensor

    def gathered(self, width: int, rows: int) -> Ref:
        """Where the attention results of several sequences meet; every layer uses the same memory."""
        if (width, rows) not in self._gathered:
            self._gathered[width, rows] = self.w.matrix(width, rows)
        return self._gathered[width, rows]

    def attention(self, op: Op) -> None:
        a = op.attrs
        assert isinstance(a, Attention)
        q, k, v = (self.values.get(value) for value in op.inputs)
        assert k is not None
        assert v is not None
        keys, values = self._kv.tables[a.layer]
        self.store(keys, k)
        self.store(values, v)
        if q is None:  # nobody wants a row of this pass: it only fills the cache
            return
        results = [(span, self._attend(a, op.rows, q, i, span)) for i, span in self._spans(op.rows)]
        if len(results) == 1:
            self.values[op.out] = results[0][1]
            return
        whole = self.gathered(op.out.width, q.rows)
        for (lo, hi), result in results:
            self.w.expand(self.lib.ggml_cpy(self.ctx, result.tensor, self.w.plain(whole.part(lo, hi))))
        self.values[op.out] = whole

    def _spans(self, rows: Rows) -> list[tuple[int, tuple[int, int]]]:
        """For each sequence that has rows of a kind: its number and its first and last row."""
        out, at = [], 0
        for i, part in enumerate(self.shape.parts):
            n = part[0] if rows == "tokens" else part[1]
            if n:
                out.append((i, (at, at + n)))
            at += n
        return out

    def _attend(self, a: Attention, rows: Rows, q: Ref, part: int, span: tuple[int, int]) -> Ref:
        keys, values = self._kv.tables[a.layer]
        heads = self.w.heads(q.part(*span), a.head_dim)
        result = self.lib.ggml_flash_attn_ext(
            self.ctx, self.lib.ggml_permute(self.ctx, heads, 0, 2, 1, 3),
            self.window(keys, part), self.window(values, part),
            self.mask(part, rows), a.scale, 0.0, 0.0,
        )  # fmt: skip
        width, n = a.n_heads * a.head_dim, span[1] - span[0]
        return self.w.result(self.lib.ggml_reshape_2d(self.ctx, result, width, n), width, n)


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
    "attention": Emitter.attention,
    "select": _select,
    "swiglu": _swiglu,
    "add": _add,
}
KINDS = frozenset(EMIT) | {"linear", "head", "rope"}
