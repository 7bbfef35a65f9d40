"""A model's forward step as data: weights, values, ops. No device is in it.

Every value is a float32 matrix with one row per token. There are two kinds of rows: `tokens`, one for each
token of the step, and `wanted`, one for each token whose result is wanted. The op `select` goes from
the first to the second, so that a prompt's last layer works on one row instead of hundreds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from hetrun.errors import ModelFileError
from hetrun.graph.ops import OPS, Attention, Attrs, OpForm, Stateful
from hetrun.graph.quant import QuantType, by_name
from hetrun.system.file_identity import Stamp

Rows = Literal["tokens", "wanted"]


@dataclass(frozen=True, slots=True)
class Extent:
    """Rows of `row_bytes` bytes that begin every `stride` bytes from `offset` in a file.

    The file must be the one with the stamp; without one it may be any.
    """

    path: str
    offset: int
    rows: int
    row_bytes: int
    stride: int
    stamp: Stamp | None = None

    @property
    def end(self) -> int:
        """The first byte behind the last row."""
        return self.offset + (self.rows - 1) * self.stride + self.row_bytes


@dataclass(frozen=True, slots=True)
class Constant:
    """Rows that lie in no file: what an architecture computes from its settings, such as rope factors."""

    data: bytes = field(repr=False)
    rows: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return len(self.data) // self.rows


ReadExtent = Callable[[Extent], npt.NDArray[np.uint8]]


class Remade(ABC):
    """Rows that a file has in another form: they are made of its bytes when they are read."""

    __slots__ = ()

    @property
    @abstractmethod
    def rows(self) -> int:
        """How many there are."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of one."""

    @property
    @abstractmethod
    def sources(self) -> tuple[Extent, ...]:
        """What they are made of."""

    @abstractmethod
    def slice(self, a: int, b: int) -> Remade:
        """Rows a to b."""

    @abstractmethod
    def make(self, read: ReadExtent) -> npt.NDArray[np.uint8]:
        """The rows [rows, row_bytes]; `read` gives an extent's bytes, row after row."""


Part = Extent | Constant | Remade


@dataclass(frozen=True, slots=True)
class Weight:
    """An immutable matrix [n_out, n_in] of one quantisation type, in one or several places of files.

    A vector is a matrix of one row. The parts follow each other along the rows.
    """

    name: str
    shape: tuple[int, int]
    quant: QuantType
    parts: tuple[Part, ...]

    def __hash__(self) -> int:
        """Without the parts: of experts that lie by themselves there are hundreds."""
        return hash((self.name, self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the weight as it is stored."""
        return self.shape[0] * self.quant.row_bytes(self.shape[1])

    def rows(self, a: int, b: int) -> Weight:
        """Rows a to b."""
        _check_range("rows", self, a, b, self.shape[0])
        parts: list[Part] = []
        first = 0
        for part in self.parts:
            if first >= b:
                break  # of hundreds of parts an expert needs one
            if first + part.rows > a:
                parts.append(_part_rows(part, max(a - first, 0), min(b - first, part.rows)))
            first += part.rows
        return replace(self, name=f"{self.name}[{a}:{b}]", shape=(b - a, self.shape[1]), parts=tuple(parts))

    def blocks(self, numbers: Sequence[int], rows: int, what: str) -> Weight:
        """Of its blocks of this many rows those with these numbers, in this order; `what` they are, for its
        name."""
        runs: list[list[int]] = []
        for n in numbers:
            if runs and runs[-1][1] == n:
                runs[-1][1] += 1
            else:
                runs.append([n, n + 1])
        parts = tuple(p for a, b in runs for p in self.rows(a * rows, b * rows).parts)
        name = f"{self.name}[{what} {', '.join(spelled(a, b) for a, b in runs)}]"
        return replace(self, name=name, shape=(len(numbers) * rows, self.shape[1]), parts=parts)

    @property
    def upright(self) -> Weight:
        """A vector as a column: a row for each of its numbers."""
        n = self.shape[1]
        if self.shape[0] != 1 or self.quant.block != 1 or len(self.parts) != 1:
            raise ValueError(f"{self.name} is no vector of plain numbers")
        (whole,) = self.parts
        number = self.quant.row_bytes(1)
        if isinstance(whole, Remade):
            raise ValueError(f"{self.name} does not lie in its file as it is")
        column = (
            replace(whole, rows=n)
            if isinstance(whole, Constant)
            else replace(whole, rows=n, row_bytes=number, stride=number)
        )
        return replace(self, shape=(n, 1), parts=(column,))

    @property
    def lying(self) -> Weight:
        """A column as a vector: a row of all its numbers."""
        n = self.shape[0]
        if self.shape[1] != 1 or self.quant.block != 1 or len(self.parts) != 1:
            raise ValueError(f"{self.name} is no column of plain numbers")
        (whole,) = self.parts
        if isinstance(whole, Remade) or (isinstance(whole, Extent) and whole.stride != whole.row_bytes):
            raise ValueError(f"{self.name} does not lie in its file as it is")
        if isinstance(whole, Constant):
            return replace(self, shape=(1, n), parts=(replace(whole, rows=1),))
        row = self.quant.row_bytes(n)
        return replace(self, shape=(1, n), parts=(replace(whole, rows=1, row_bytes=row, stride=row),))

    def cols(self, a: int, b: int) -> Weight:
        """Columns a to b; both must lie on the border of a quantisation block."""
        _check_range("columns", self, a, b, self.shape[1])
        if a % self.quant.block or b % self.quant.block:
            raise ValueError(
                f"{self.name}: columns {a}:{b} cut a block of {self.quant.block} {self.quant.name} weights"
            )
        skip, width = a // self.quant.block * self.quant.block_bytes, self.quant.row_bytes(b - a)
        parts = tuple(_part_cols(p, skip, width) for p in self.parts)
        return replace(self, name=f"{self.name}[:,{a}:{b}]", shape=(self.shape[0], b - a), parts=parts)


def spelled(a: int, b: int) -> str:
    """The numbers from a to b, without b: `3`, `3-5`."""
    return f"{a}-{b - 1}" if b - a > 1 else str(a)


def _part_rows(part: Part, a: int, b: int) -> Part:
    if isinstance(part, Remade):
        return part.slice(a, b)
    if isinstance(part, Constant):
        return Constant(part.data[a * part.row_bytes : b * part.row_bytes], b - a)
    return replace(part, offset=part.offset + a * part.stride, rows=b - a)


def _part_cols(part: Part, skip: int, width: int) -> Part:
    if isinstance(part, Remade):
        raise ValueError("its rows are made when they are read, and only as a whole")
    if isinstance(part, Constant):
        starts = range(skip, len(part.data), part.row_bytes)
        return Constant(b"".join(part.data[at : at + width] for at in starts), part.rows)
    return replace(part, offset=part.offset + skip, row_bytes=width)


def constant(name: str, values: npt.NDArray[np.float32]) -> Weight:
    """A float32 vector that an architecture computed, as a weight."""
    return Weight(name, (1, len(values)), by_name("F32"), (Constant(values.astype("<f4").tobytes()),))


def stack(weights: Sequence[Weight]) -> Weight:
    """Weights of one width and type on top of each other, as one weight."""
    first = weights[0]
    if len(weights) == 1:
        return first
    for w in weights:
        if w.quant is not first.quant or w.shape[1] != first.shape[1]:
            raise ValueError(f"{w.name} cannot be stacked on {first.name}: another type or width")
    rows = sum(w.shape[0] for w in weights)
    parts = tuple(p for w in weights for p in w.parts)
    return Weight("+".join(w.name for w in weights), (rows, first.shape[1]), first.quant, parts)


def _check_range(what: str, weight: Weight, a: int, b: int, n: int) -> None:
    if not 0 <= a < b <= n:
        raise ValueError(f"{weight.name}: {what} {a}:{b} are not inside 0:{n}")


@dataclass(frozen=True, slots=True)
class Value:
    """A float32 matrix that one op makes and others read."""

    name: str
    width: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class Op:
    """One step of the computation; what each kind means stands in `hetrun.graph.ops`."""

    kind: str
    inputs: tuple[Value, ...]
    out: Value
    weights: tuple[Weight, ...]
    attrs: Attrs
    scope: str

    @property
    def rows(self) -> Rows:
        """The kind of rows the op works on: that of its first input, or tokens."""
        return self.inputs[0].rows if self.inputs else "tokens"


@dataclass(frozen=True, slots=True)
class FileTable:
    """A table that is too large for memory, for what a step reads of it: rows are read from its file when
    tokens come. Each is times `factor`, and cut into values of one width."""

    weight: Weight
    values: tuple[Value, ...]
    factor: float


@dataclass(frozen=True, slots=True)
class Graph:
    """One forward step; `outputs` are the last hidden state and the logits, both of wanted rows."""

    ops: tuple[Op, ...]
    hidden: Value
    logits: Value
    given: tuple[Value, ...] = ()  # values that no op makes: they come with the tokens, a row for each
    tables: tuple[FileTable, ...] = ()
    # Where rows of a picture see each other, if they do: in all attention, or only where it has a window.
    whole: Literal["all", "windows"] = "all"

    @property
    def outputs(self) -> tuple[Value, Value]:
        """What leaves the graph."""
        return (self.hidden, self.logits)

    @property
    def embedded(self) -> Value:
        """What tokens are looked up as; rows that come from elsewhere may take its place."""
        found = next(op.out for op in self.ops if op.kind == "embed")
        return next((op.out for op in self.ops if op.kind == "scale" and op.inputs == (found,)), found)

    def after_layers(self, n: int) -> tuple[Value, ...]:
        """What each of the first n layers gives to the next one."""
        return tuple([op.out for op in self.ops if op.scope.startswith(f"blk.{i}.")][-1] for i in range(n))

    def weights(self) -> dict[str, Weight]:
        """Every weight by name."""
        return {w.name: w for op in self.ops for w in op.weights}

    def validate(self) -> None:
        """Check that each op reads what stands before it and has the form its kind asks for."""
        come = (*self.given, *(value for table in self.tables for value in table.values))
        made: dict[str, Value] = {value.name: value for value in come}
        heads: dict[int, int] = {}  # of each layer's attention, the KV heads that had their turn
        states: set[tuple[str, int]] = set()  # kinds and layers of what keeps a state
        for i, op in enumerate(self.ops):
            try:
                _check_op(op)
                for value in op.inputs:
                    if made.get(value.name) != value:
                        raise ValueError(f"reads {value.name}, which nothing before it makes")
                if op.out.name in made:
                    raise ValueError(f"makes {op.out.name} a second time")
                if isinstance(op.attrs, Attention):
                    heads[op.attrs.layer] = _written(op.attrs, heads.get(op.attrs.layer, 0))
                if isinstance(op.attrs, Stateful):
                    if (op.kind, op.attrs.layer) in states:
                        raise ValueError(f"is a second one for layer {op.attrs.layer}")
                    states.add((op.kind, op.attrs.layer))
            except ValueError as e:
                raise ValueError(f"op {i} ({op.kind} in {op.scope}) {e}") from None
            made[op.out.name] = op.out
        for value in self.outputs:
            if made.get(value.name) != value:
                raise ValueError(f"nothing makes the output {value.name}")
            if value.rows != "wanted":
                raise ValueError(f"the output {value.name} has a row for each token, not for each wanted one")


def _written(a: Attention, before: int) -> int:
    """The KV heads of a layer that have had their turn, after some more of them."""
    if a.sharing == "borrows":
        if not before:
            raise ValueError(f"borrows keys and values of layer {a.layer}, which has none yet")
        return before
    # Shares of a layer write side by side; others would write to the same rows.
    if a.first != before:
        what = f"begins at KV head {a.first} of layer {a.layer}, not at {before}"
        raise ValueError(what if a.first else f"is a second attention for layer {a.layer}")
    return before + a.n_kv_heads


def _check_op(op: Op) -> None:
    spec = OPS.get(op.kind)
    if spec is None:
        raise ValueError(f"is of no known kind; there are {', '.join(OPS)}")
    if type(op.attrs) is not spec.attrs:
        raise ValueError(f"has attributes of type {type(op.attrs).__name__}, not {spec.attrs.__name__}")
    enough = len(op.inputs) == spec.n_inputs or (spec.more_inputs and len(op.inputs) > spec.n_inputs)
    if not enough or len(op.weights) not in spec.n_weights:
        raise ValueError(f"has {len(op.inputs)} inputs and {len(op.weights)} weights")
    rows, expected = tuple(v.rows for v in (*op.inputs, op.out)), _expected_rows(op)
    if rows != expected:
        raise ValueError(f"goes from {_shown(rows)} rows, but its kind from {_shown(expected)}")
    form = OpForm(
        op.attrs, tuple(v.width for v in op.inputs), tuple(w.shape for w in op.weights), op.out.width
    )
    for what, found, wanted in spec.sizes(form):
        if found != wanted:
            raise ValueError(f"does not fit together: its {what} is {found}, not {wanted}")


def _expected_rows(op: Op) -> tuple[Rows, ...]:
    """The kinds of rows of the inputs and the result."""
    if op.kind == "select":
        return ("tokens", "wanted")
    if op.kind == "attention":
        tokens: Rows = "tokens"
        return (op.rows, *(tokens for _ in op.inputs[1:]), op.rows)
    return (op.rows,) * (len(op.inputs) + 1)


def _shown(rows: Sequence[str]) -> str:
    return f"{', '.join(rows[:-1]) or 'no'} to {rows[-1]}"


@dataclass(frozen=True, slots=True)
class PredictionBlock:
    """A part of a model's file that predicts the token after the next.

    Its graph is given two values: the embeddings of tokens, rows of `table`, and of each the hidden state of
    the token before it, the model's or its own.
    """

    graph: Graph
    table: Weight


def in_scope(scope: str, prefix: str) -> bool:
    """Whether `scope` is `prefix` or lies below it; the empty prefix is everything."""
    return not prefix or scope == prefix or scope.startswith(prefix + ".")


class WeightSource(Protocol):
    """Where a builder finds weights by the names GGUF gives them."""

    def find(self, name: str) -> Weight | None:
        """The weight of that name, or None."""
        ...

    @property
    def path(self) -> str:
        """The file, for messages."""
        ...


class ModelMeta(Protocol):
    """A model's settings by GGUF key, without the architecture's prefix: `block_count`."""

    def require_int(self, key: str, lo: int, hi: int) -> int: ...
    def get_int(self, key: str, default: int, lo: int, hi: int) -> int: ...
    def get_float(self, key: str, default: float) -> float: ...
    def get_str(self, key: str, default: str) -> str: ...
    def get_bool(self, key: str, default: bool) -> bool: ...

    def get_numbers(self, key: str, n: int) -> tuple[float, ...] | None:
        """An array of n numbers; a single number counts for all n; None where the key is missing."""
        ...


class Architecture(Protocol):
    """A file in `models/`: it reads its settings and builds its graph."""

    name: str

    def build(self, builder: GraphBuilder, meta: ModelMeta) -> Graph:
        """The forward step."""
        ...


@runtime_checkable
class Predicts(Protocol):
    """An architecture whose files may have a block that predicts the token after the next."""

    def predicts(self, builder: GraphBuilder, meta: ModelMeta) -> PredictionBlock | None:
        """The block; None where a file has none."""
        ...


@runtime_checkable
class Leaves(Protocol):
    """An architecture that leaves some files to llama.cpp."""

    def leaves(self, meta: ModelMeta) -> bool:
        """Whether a file is one of those."""
        ...


class GraphBuilder:
    """Writes a graph down op by op, so that a model's file reads like its paper."""

    def __init__(self, source: WeightSource, context: int | None = None, spatial: bool = False) -> None:
        """`context` is how long sequences may become, where a model computes differently for longer ones;
        None: as long as the model was trained for. `spatial`: tokens may have positions in height and width,
        where the model knows such; else all of these are one."""
        self.context, self.spatial = context, spatial
        self._source = source
        self._ops: list[Op] = []
        self._given: list[Value] = []
        self._tables: list[FileTable] = []
        self._scope: list[str] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Ops made inside lie in this scope: `blk.3.attn`."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    def has(self, name: str) -> bool:
        """Whether the model has a weight of that name."""
        return self._source.find(name) is not None

    def check(self, good: bool, reason: str) -> None:
        """Refuse a model whose settings contradict each other."""
        if not good:
            raise ModelFileError(
                self._source.path, f"{reason}; the file is damaged, or was converted wrongly"
            )

    def weight(self, name: str, rows: int, width: int) -> Weight:
        """The weight of that name, which must have that shape."""
        found = self._source.find(name)
        if found is None:
            raise ModelFileError(self._source.path, f"the tensor {name} is missing: the file is incomplete")
        shape = f"{found.shape[0]} x {found.shape[1]}"
        self.check(
            found.shape == (rows, width),
            f"the tensor {name} is {shape}, but the settings say {rows} x {width}",
        )
        return found

    def op(self, kind: str, inputs: Sequence[Value], weights: Sequence[Weight], attrs: Attrs, width: int,
           rows: Rows | None = None, part: str = "") -> Value:  # fmt: skip
        """Add an op whose result has `width` columns; rows are those of the first input unless given."""
        out_rows: Rows = rows or (inputs[0].rows if inputs else "tokens")
        scope = ".".join([*self._scope, *([part] if part else [])])
        out = Value(f"{scope}.{kind}.{len(self._ops)}", width, out_rows)
        self._ops.append(Op(kind, tuple(inputs), out, tuple(weights), attrs, scope))
        return out

    def given(self, name: str, width: int) -> Value:
        """A value that comes with the tokens of a step."""
        value = Value(name, width, "tokens")
        self._given.append(value)
        return value

    def table(self, weight: Weight, n: int, factor: float) -> tuple[Value, ...]:
        """Rows of a table that stays in its file, times the factor, as n values."""
        width = weight.shape[1] // n
        values = tuple(Value(f"{weight.name}[{i}]", width, "tokens") for i in range(n))
        self._tables.append(FileTable(weight, values, factor))
        return values

    def finish(self, hidden: Value, logits: Value) -> Graph:
        """The graph, checked: a file may hold settings that no model can have."""
        graph = Graph(tuple(self._ops), hidden, logits, tuple(self._given), tuple(self._tables))
        try:
            graph.validate()
        except ValueError as e:
            raise ModelFileError(self._source.path, f"its settings do not make a model: {e}") from e
        return graph


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a layer keeps of a token, and of how many tokens; a window of 0 keeps all. `latent`: keys are the
    values as well."""

    n_heads: int
    head_dim: int
    window: int = 0
    latent: bool = False

    @classmethod
    def of(cls, a: Attention) -> KvShape:
        """What an attention needs; a layer's last share ends with the layer's last head."""
        return cls(a.first + a.n_kv_heads, a.head_dim, a.window, a.sharing == "latent")


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a layer keeps of a sequence however long it is: a number of floats for each kind of its ops."""

    floats: Mapping[str, int]


def kv_shapes(graph: Graph) -> Mapping[int, KvShape]:
    """What each layer with attention keeps."""
    return kept_by(graph.ops)


def kept_by(ops: Iterable[Op]) -> Mapping[int, KvShape]:
    """What layers keep, for the attention among some ops."""
    attentions = [op.attrs for op in ops if isinstance(op.attrs, Attention)]
    return {a.layer: KvShape.of(a) for a in attentions}


def states_of(ops: Iterable[Op]) -> Mapping[int, StateShape]:
    """What layers keep in states of a fixed size, for some ops."""
    found: dict[int, dict[str, int]] = {}
    for op in ops:
        if isinstance(op.attrs, Stateful):
            found.setdefault(op.attrs.layer, {})[op.kind] = op.attrs.floats
    return {layer: StateShape(floats) for layer, floats in found.items()}
