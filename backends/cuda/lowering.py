"""A segment as a list of kernels: which ones, on which addresses, for passes of one shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_void_p
from dataclasses import dataclass

from hetrun.backend import FLOAT_BYTES, Buffers, PassShape, Segment
from hetrun.backend.fusion import GatedProduct
from hetrun.backends.cuda import fusion, matmul_launch, moe, weights
from hetrun.backends.cuda.arena import DeviceArena
from hetrun.backends.cuda.attention import attend, counts, looks
from hetrun.backends.cuda.driver import Address, Argument, DeviceProduct
from hetrun.backends.cuda.experts.slots import GpuSlots
from hetrun.backends.cuda.fusion import FusedSegment, Item, RotatedAttention, SiblingProducts
from hetrun.backends.cuda.int8 import lowering as long_int8
from hetrun.backends.cuda.kernel_cache import KernelLibrary, at, long, number, real
from hetrun.backends.cuda.kv_mirror import Part, Slabs
from hetrun.backends.cuda.matmul_launch import MatmulOutput
from hetrun.backends.cuda.measured.few_rows import MOST, FewRowsLimits
from hetrun.backends.cuda.pass_args import AXES, FEW, Tellers
from hetrun.backends.cuda.programs import Source
from hetrun.backends.cuda.rope import Rotations
from hetrun.backends.cuda.stages import Portion, Work
from hetrun.backends.cuda.states.lowering import causal_conv, delta_net
from hetrun.backends.cuda.states.mirror import StateMirror
from hetrun.backends.cuda.streamed.weight_ring import RingBlock
from hetrun.backends.cuda.weights import DeviceWeight
from hetrun.graph import Op, Value
from hetrun.graph.ops import (
    EverySecond,
    Gelu,
    Grow,
    LayerNorm,
    PerHead,
    Positions,
    RmsNorm,
    Rope,
    Scale,
    Softcap,
)
from hetrun.memory.kv.cache import KvCache

SMALL = Source("small")
THREADS = 256
TILE_ROWS = 256
MOST_BLOCKS = 4096  # of what takes one number at a time; each then takes several
ENDLESS = 1 << 60


@dataclass(frozen=True, slots=True)
class CudaPlace:
    """What a segment is compiled with."""

    library: KernelLibrary
    fused: FusedSegment
    buffers: Buffers
    blocks: Mapping[
        int, Sequence[RingBlock]
    ]  # of weights that cross, by the number of the item that needs them
    kv: KvCache
    slabs: Mapping[int, Slabs]  # by group
    borrowed: Mapping[int, Slabs]  # of layers that are not the segment's
    states: StateMirror | None
    slots: GpuSlots  # for experts
    exact: bool  # else inputs of products may be rounded to bytes
    rotations: Rotations
    tellers: Tellers
    scratch: Address  # for weights that are unpacked
    scratch_bytes: int
    processors: int
    int8_rows: int  # of a pass, up to which products may round their input to bytes; 0: none may
    few_rows: FewRowsLimits

    def slabs_of(self, group: int, part: Part) -> Slabs:
        """Where some heads of a layer have their rows."""
        own = self.slabs.get(group)
        return own if own and (part, 0) in own.planes else self.borrowed[group]


class CudaEmitter:
    """Writes the work of a segment. It lays values out one behind the other from an address on, and results,
    which others may read, from another one: with any addresses it finds out how much memory that takes."""

    def __init__(
        self, place: CudaPlace, segment: Segment, shape: PassShape, base: Address, results: Address
    ) -> None:
        self.place, self.shape = place, shape
        self._tokens, self._wanted = shape.tokens, shape.wanted  # each is a sum
        self.arena, self._results = DeviceArena(base, ENDLESS), DeviceArena(results, ENDLESS)
        self._kept = frozenset(segment.writes)
        self._run = place.library.launch
        self.portions = [Portion()]
        self._angles: dict[int, Address] = {}  # by what turns alike
        self._in_bytes: dict[Value, Address] = {}  # of inputs that have been rounded, as long as they live
        kinds = dict.fromkeys(looks(place.kv, op) for op in segment.ops if op.kind == "attention")
        self.seeing = [place.tellers.seeing(shape, kind) for kind in kinds]
        groups, ended = tuple(place.slabs), self._most_counts(segment)
        self.given = place.tellers.of(shape, self.seeing, groups, place.states is not None, ended)
        self.given_at = self.arena.take(self.given.nbytes, "what a pass tells")
        self.at: dict[Value, Address] = {}
        self.inputs = {value: self.make(value) for value in segment.reads}
        items, last = place.fused.items, place.fused.ends
        self._wanted_in_bytes = {value for item in items if (value := self._read_in_bytes(item))}
        for i, item in enumerate(items):
            if i in place.blocks:
                self.portions.append(Portion(place.blocks[i]))
            self._ends = last.get(i, [])
            self._emit(item)
            for value in self._ends:
                for made in (self.at, self._in_bytes):
                    if value in made:
                        self.arena.give(made.pop(value))

    def _most_counts(self, segment: Segment) -> int:
        """Of blocks that have ended: what the attention with most of them needs."""
        rows = {seeing.looking: seeing.rows for seeing in self.seeing}
        each = [(op, rows[looks(self.place.kv, op)]) for op in segment.ops if op.kind == "attention"]
        return max((counts(op, n, self.place.processors) for op, n in each if n), default=0)

    @property
    def nbytes(self) -> int:
        """Memory that all of it takes besides results."""
        return self.arena.reached

    @property
    def result_bytes(self) -> int:
        """Memory of results."""
        return self._results.reached

    def rows(self, value: Value) -> int:
        """Rows that a value has in passes of this shape."""
        return self._tokens if value.rows == "tokens" else self._wanted

    # --- addresses

    def make(self, value: Value) -> Address:
        """Memory for a value."""
        arena = self._results if value in self._kept else self.arena
        self.at[value] = arena.take(FLOAT_BYTES * self.rows(value) * value.width, value.name)
        return self.at[value]

    def told(self, name: str) -> c_void_p:
        """Where a pass tells something."""
        return at(self.given_at + self.given.offset(name))

    def held(self, op: Op) -> list[DeviceWeight]:
        """The weights of an op."""
        return [weights.held(self.place.buffers, use) for use in self.place.fused.uses[id(op)]]

    # --- launches

    def do(
        self, source: Source, name: str, grid: tuple[int, ...], threads: int, *a: Argument, shared: int = 0
    ) -> None:
        """A kernel."""
        self.give(self._run(source, name, grid, threads, *a, shared=shared))

    def give(self, work: Work) -> None:
        """Behind all else."""
        self.portions[-1].work.append(work)

    def each(self, name: str, n: int, *arguments: Argument) -> None:
        """A kernel that takes one number at a time."""
        self.do(SMALL, name, (min(MOST_BLOCKS, -(-n // THREADS)),), THREADS, *arguments)

    def _emit(self, item: Item) -> None:
        op = fusion.members(item)[-1]
        if op.kind == "attention":
            attend(self, op, item if isinstance(item, RotatedAttention) else None)
        elif self.rows(fusion.members(item)[-1].out):
            match item:
                case SiblingProducts():
                    self._products(item)
                case GatedProduct():
                    self._gated(item)
                case _:
                    _EMIT[op.kind](self, op)

    # --- products

    def _products(self, item: SiblingProducts) -> None:
        x, weight = item.ops[0].inputs[0], self.held(item.ops[0])[0]
        if self.rows(x) <= FEW:
            self._few(x, weight, self._outputs(item))
        elif long_int8.takes(self, weight, self.rows(x)):
            long_int8.products(self, x, weight, self._outputs(item))
        elif self._as_it_lies(weight, self.rows(x)):
            self.few(weight.source, x, self._outputs(item))
        else:
            with_bf16 = self.rounded(x)
            for i, op in enumerate(item.ops):
                self._summed(op, x, with_bf16, item.outs[i], item.addend(i))
            self.arena.give(with_bf16)

    def _as_it_lies(self, weight: DeviceWeight, rows: int) -> bool:
        """Whether this many rows, which are not few, are multiplied without unpacking a weight."""
        place = self.place
        return rows <= MOST and rows <= place.few_rows.of(weight, place.scratch, place.scratch_bytes)

    def _summed(self, op: Op, x: Value, x_bf16: Address, out: Value, addend: Value | None) -> None:
        """A product of many tokens, and what it is added to: into that itself where it is not read later."""
        if addend and addend in self._ends and out not in self._kept:
            self.at[out] = self.at.pop(addend)
            self._many(op, x, x_bf16, self.at[out], add=True)
            return
        target, n = self.make(out), self.rows(out) * out.width
        self._many(op, x, x_bf16, target)
        if addend:
            self.each("add", n, at(target), at(self.at[addend]), at(target), long(n))

    def _outputs(self, item: SiblingProducts) -> Sequence[MatmulOutput]:
        """The matrices of a launch, with what is added to each."""
        outputs = []
        for i, (op, out) in enumerate(zip(item.ops, item.outs, strict=True)):
            (weight, *bias), target = self.held(op), self.make(out)
            rows, addend = weight.shape[0], item.addend(i)
            add = self.at[addend] if addend else 0
            outputs.append(
                MatmulOutput(weight.address, bias[0].address if bias else 0, add, target, rows, rows)
            )
        return outputs

    def _few(self, x: Value, weight: DeviceWeight, outputs: Sequence[MatmulOutput]) -> None:
        if self.takes_bytes(weight):
            source, columns = matmul_launch.source(weight.quant.name, int8=True), self.in_bytes(x)
            self.few_of(source, columns, outputs, int8=True)
        else:
            self.few(weight.source, x, outputs)

    def few(self, source: Source, x: Value, outputs: Sequence[MatmulOutput]) -> None:
        """Products of one input with matrices of one type, three at most, each for few tokens at a time."""
        self.few_of(source, (self.at[x], x.width, x.width, self.rows(x)), outputs)

    def few_of(
        self,
        source: Source,
        columns: tuple[Address, int, int, int],
        outputs: Sequence[MatmulOutput],
        int8: bool = False,
    ) -> None:
        """The same for some columns: where they begin, how many, from row to row, and rows."""
        begin, cols, stride, n = columns
        sizes = [int(o.rows) for o in outputs]
        first, second, third = matmul_launch.three(outputs)
        name, grid = f"few_{matmul_launch.group_of(n)}", (matmul_launch.blocks(n, *sizes, int8=int8),)
        facts = at(begin), number(cols), number(stride), number(n)
        self.do(source, name, grid, matmul_launch.THREADS, first, second, third, *facts)

    def _read_in_bytes(self, item: Item) -> Value | None:
        """The input of an item's products, where it is multiplied as bytes."""
        match item:
            case SiblingProducts():
                op, which = item.ops[0], 0
            case GatedProduct():
                op, which = item.gate, 0
            case Op(kind="moe"):
                op, which = item, 1  # behind the router
            case _:
                return None
        x, weight = op.inputs[0], self.held(op)[which]
        n = self.rows(x)
        if n <= FEW:
            return x if self.takes_bytes(weight) else None
        many = moe.experts_in_bytes(self, op) if op.kind == "moe" else long_int8.takes(self, weight, n)
        return x if many else None

    def takes_bytes(self, weight: DeviceWeight) -> bool:
        """Whether few rows are multiplied by a weight as bytes."""
        return not self.place.exact and matmul_launch.takes_int8(weight.quant.name, weight.shape[1])

    def in_bytes(self, x: Value) -> tuple[Address, int, int, int]:
        """A value in bytes, as `few_of` takes it: made once for all of its products."""
        n, cols = self.rows(x), x.width
        if x not in self._in_bytes:
            self._in_bytes[x] = self.round_int8(self.at[x], n, cols)
        return self._in_bytes[x], cols, matmul_launch.int8_row(cols), n

    def room_in_bytes(self, x: Value) -> Address:
        """Where a kernel puts a value that it makes in bytes as well; 0 where it is not wanted in bytes."""
        if x not in self._wanted_in_bytes:
            return 0
        nbytes = self.rows(x) * matmul_launch.int8_row(x.width)
        self._in_bytes[x] = self.arena.take(nbytes, "inputs in bytes")
        return self._in_bytes[x]

    def round_int8(self, begin: Address, n: int, cols: int) -> Address:
        """Rows of floats as bytes."""
        target = self.arena.take(n * matmul_launch.int8_row(cols), "inputs in bytes")
        fours = n * cols // 4
        grid = (min(MOST_BLOCKS, -(-fours // THREADS)),)
        self.do(SMALL, "round_int8", grid, THREADS, at(begin), at(target), number(cols), long(n * cols))
        return target

    def per_head(self, op: Op) -> None:
        """A product for each head; what is passed on is copied."""
        a, (weight,) = op.attrs, self.held(op)
        assert isinstance(a, PerHead)
        x, (rows, cols) = op.inputs[0], weight.shape
        n, target, width, made = self.rows(x), self.make(op.out), x.width // a.heads, rows // a.heads
        passed = width - a.first - cols if a.passed else 0
        for h in range(a.heads):
            matrix = weight.address + h * made * weight.quant.row_bytes(cols)
            to = target + FLOAT_BYTES * (h * (made + passed) + passed)
            begin = self.at[x] + FLOAT_BYTES * (h * width + a.first)
            output = MatmulOutput(matrix, 0, 0, to, made, op.out.width)
            self.few_of(weight.source, (begin, cols, x.width, n), [output])
        if passed:
            count = n * a.heads * passed
            sizes = number(width), number(a.first + cols), number(made + passed), number(passed)
            self.each("copy_slices", count, at(self.at[x]), at(target), *sizes, long(count))

    def rounded(self, x: Value) -> Address:
        """A value in bf16."""
        n = self.rows(x) * x.width
        target = self.arena.take(2 * n, f"{x.name} in bf16")
        self.each("round_bf16", n, at(self.at[x]), at(target), long(n))
        return target

    def _many(self, op: Op, x: Value, x_bf16: Address, target: Address, add: bool = False) -> None:
        """A product by cuBLAS, of as many rows of weights at once as there is room to unpack; `add`:
        to what is there."""
        weight, *bias = self.held(op)
        rows, cols = weight.shape
        n, plain = self.rows(x), weight.quant.name == "BF16"
        step = rows if plain else rows_at_once(rows, self.place.scratch_bytes // (2 * cols))
        for a in range(0, rows, step):
            b = min(a + step, rows)
            begin = weight.address + a * weight.quant.row_bytes(cols)
            if not plain:
                pieces = (b - a) * cols // 8
                grid = (min(MOST_BLOCKS, -(-pieces // THREADS)),)
                arguments = at(begin), at(self.place.scratch), long(pieces)
                self.do(weight.source, "unpack_bf16", grid, THREADS, *arguments)
                begin = self.place.scratch
            self.give(DeviceProduct(x_bf16, begin, target + FLOAT_BYTES * a, n, b - a, cols, rows, add))
        if bias:
            self.each("add_row", n * rows, at(target), at(bias[0].address), number(rows), long(n * rows))

    def _gated(self, item: GatedProduct) -> None:
        x, n = item.gate.inputs[0], self.rows(item.act.out)
        target, width = self.make(item.act.out), item.act.out.width
        gate = self.held(item.gate)[0]
        in_bytes = n > FEW and long_int8.takes(self, gate, n)
        if n <= FEW or (not in_bytes and self._as_it_lies(gate, n)):
            (gate, *gate_bias), (up, *up_bias) = self.held(item.gate), self.held(item.up)
            biases = [at(b[0].address if b else 0) for b in (gate_bias, up_bias)]
            small = n <= FEW and self.takes_bytes(gate)
            begin, cols, stride, _ = self.in_bytes(x) if small else (self.at[x], x.width, x.width, n)
            source = matmul_launch.source(gate.quant.name, small)
            name, grid = f"gated_{matmul_launch.group_of(n)}", (matmul_launch.blocks(n, width, int8=small),)
            given = at(gate.address), at(up.address), *biases
            facts = at(begin), number(cols), number(stride), number(n), number(activation_of(item.act))
            self.do(source, name, grid, matmul_launch.THREADS, *given, at(target), number(width), *facts)
            return
        if in_bytes:
            long_int8.gated(self, item, target, activation_of(item.act))
            return
        with_bf16, other = self.rounded(x), self.arena.take(FLOAT_BYTES * n * width, "up")
        self._many(item.gate, x, with_bf16, target)
        self._many(item.up, x, with_bf16, other)
        self._activate(item.act, target, other, target)
        self.arena.give(with_bf16)
        self.arena.give(other)

    def _activate(self, op: Op, x: Address, y: Address, target: Address) -> None:
        n = self.rows(op.out) * op.out.width
        exact = [number(op.attrs.exact)] if isinstance(op.attrs, Gelu) else []
        self.each(op.kind, n, at(x), at(y), at(target), long(n), *exact)

    # --- the other ops

    def lookup(self, op: Op) -> None:
        table = self.held(op)[0]
        ids = "positions" if isinstance(op.attrs, Positions) else "tokens"
        offset = op.attrs.offset if isinstance(op.attrs, Positions) else 0
        arguments = (
            at(table.address),
            self.told(ids),
            number(offset),
            at(self.make(op.out)),
            number(op.out.width),
        )
        self.do(table.source, "lookup", (self.rows(op.out),), 128, *arguments)

    def rms_norm(self, op: Op) -> None:
        a = op.attrs
        assert isinstance(a, RmsNorm)
        x, target, n = self.at[op.inputs[0]], self.make(op.out), self.rows(op.out) * a.heads
        threads = _norm_threads(op.out.width // a.heads)
        in_bytes = self.room_in_bytes(op.out) if a.heads == 1 else 0
        arguments = (
            at(self.held(op)[0].address),
            at(target),
            at(in_bytes),
            number(op.out.width),
            number(a.heads),
            real(a.eps),
        )
        self.do(SMALL, "rms_norm", (n,), threads, at(x), *arguments, shared=threads // 8)

    def layer_norm(self, op: Op) -> None:
        a = op.attrs
        assert isinstance(a, LayerNorm)
        x, target, threads = self.at[op.inputs[0]], self.make(op.out), _norm_threads(op.out.width)
        gain, bias = ([at(w.address) for w in self.held(op)] + [at(0), at(0)])[:2]
        arguments = gain, bias, at(target), number(op.out.width), real(a.eps)
        self.do(SMALL, "layer_norm", (self.rows(op.out),), threads, at(x), *arguments, shared=threads // 8)

    def rope(self, op: Op) -> None:
        a = op.attrs
        assert isinstance(a, Rope)
        n, turns = self.rows(op.out), self.turns(op)
        pairs = n * a.n_heads * (a.head_dim // 2)
        whose = self.told("wanted") if op.rows == "wanted" else at(0)
        self.each(
            "rope",
            pairs,
            at(self.at[op.inputs[0]]),
            at(turns),
            whose,
            at(self.make(op.out)),
            number(n),
            number(a.n_heads),
            number(a.head_dim),
            number(a.n_rot),
            number(a.interleaved),
        )

    def turns(self, op: Op) -> Address:
        """How each token turns; the same for all ropes of a segment that turn alike."""
        a = op.attrs
        assert isinstance(a, Rope)
        key = self.place.fused.turning[id(op)]
        if key not in self._angles:
            turning = self.place.rotations.of(a, self.held(op)[0] if op.weights else None)
            pairs, n = a.n_rot // 2, self.shape.tokens
            self._angles[key] = self.arena.take(2 * FLOAT_BYTES * pairs * n, "angles")
            self.each(
                "angles",
                pairs * n,
                at(turning.address),
                self.told(AXES[a.axis]),
                at(self._angles[key]),
                real(turning.magnitude),
                number(pairs),
                number(n),
            )
        return self._angles[key]

    def unary(self, op: Op, *more: Argument) -> None:
        """One number of one."""
        n = self.rows(op.out) * op.out.width
        self.each(op.kind, n, at(self.at[op.inputs[0]]), at(self.make(op.out)), long(n), *more)

    def binary(self, op: Op) -> None:
        """One number of two."""
        x, y = (self.at[v] for v in op.inputs)
        self._activate(op, x, y, self.make(op.out))

    def concat(self, op: Op) -> None:
        column, target = 0, self.make(op.out)
        for value in op.inputs:
            n = self.rows(value) * value.width
            arguments = at(target + FLOAT_BYTES * column), number(value.width), number(op.out.width), long(n)
            self.each("copy_columns", n, at(self.at[value]), *arguments)
            column += value.width

    def select(self, op: Op) -> None:
        n, x = self.rows(op.out) * op.out.width, at(self.at[op.inputs[0]])
        arguments = self.told("wanted"), at(self.make(op.out)), number(op.out.width), long(n)
        self.each("select_rows", n, x, *arguments)

    def sigmoid_gate(self, op: Op) -> None:
        if op.inputs[0].width == op.out.width:
            self.binary(op)
            return
        gates, x = (at(self.at[v]) for v in op.inputs)
        n = self.rows(op.out) * op.out.width
        self.each("sigmoid_gate_rows", n, gates, x, at(self.make(op.out)), number(op.out.width), long(n))

    def every_second(self, op: Op) -> None:
        a, n = op.attrs, self.rows(op.out) * op.out.width
        assert isinstance(a, EverySecond)
        facts = number(op.out.width // a.heads), number(a.first), long(n)
        self.each(op.kind, n, at(self.at[op.inputs[0]]), at(self.make(op.out)), *facts)


def _scale(e: CudaEmitter, op: Op) -> None:
    assert isinstance(op.attrs, Scale)
    e.unary(op, real(op.attrs.factor), at(next((held.address for held in e.held(op)), 0)))


def _grow(e: CudaEmitter, op: Op) -> None:
    a, n = op.attrs, e.rows(op.out) * op.out.width
    assert isinstance(a, Grow)
    whose = e.told("wanted") if op.rows == "wanted" else at(0)
    e.each(
        "grow",
        n,
        at(e.at[op.inputs[0]]),
        e.told(AXES[0]),
        whose,
        at(e.make(op.out)),
        long(n),
        number(op.out.width),
        real(a.by),
        number(a.every),
    )


def _softcap(e: CudaEmitter, op: Op) -> None:
    assert isinstance(op.attrs, Softcap)
    e.unary(op, real(op.attrs.cap))


def _gelu(e: CudaEmitter, op: Op) -> None:
    assert isinstance(op.attrs, Gelu)
    e.unary(op, number(op.attrs.exact))


_EMIT: Mapping[str, Callable[[CudaEmitter, Op], None]] = {
    "embed": CudaEmitter.lookup,
    "positions": CudaEmitter.lookup,
    "rms_norm": CudaEmitter.rms_norm,
    "layer_norm": CudaEmitter.layer_norm,
    "rope": CudaEmitter.rope,
    "per_head": CudaEmitter.per_head,
    "causal_conv": causal_conv,
    "delta_net": delta_net,
    "moe": moe.mixture,
    "swiglu": CudaEmitter.binary,
    "geglu": CudaEmitter.binary,
    "sigmoid_gate": CudaEmitter.sigmoid_gate,
    "multiply": CudaEmitter.binary,
    "gelu": _gelu,
    "relu": CudaEmitter.unary,
    "scale": _scale,
    "grow": _grow,
    "softcap": _softcap,
    "add": CudaEmitter.binary,
    "every_second": CudaEmitter.every_second,
    "concat": CudaEmitter.concat,
    "select": CudaEmitter.select,
}
KINDS = frozenset(_EMIT) | {"linear", "head", "attention"}


def rows_of(value: Value, shape: PassShape) -> int:
    """Rows that a value has in passes of a shape."""
    return shape.tokens if value.rows == "tokens" else shape.wanted


def rows_at_once(rows: int, most: int) -> int:
    """Rows of a matrix that are unpacked at once, `most` of them if need be: about the same each time, and
    whole tiles of cuBLAS, which takes twice as long for others."""
    times = -(-rows // max(1, most))
    step = -(-rows // times // TILE_ROWS) * TILE_ROWS
    return step if step <= most else max(1, most // TILE_ROWS * TILE_ROWS or most)


def activation_of(op: Op) -> int:
    """An activation by the number that the kernels know it by."""
    if not isinstance(op.attrs, Gelu):
        return 0
    return 2 if op.attrs.exact else 1


def _norm_threads(width: int) -> int:
    """Threads of a block that works on `width` numbers: eight for each thread, in whole warps."""
    return min(1024, max(32, -(-width // 256) * 32))
