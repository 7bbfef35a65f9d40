"""A compiled segment: what is filled in before each run, and the run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import FINISHED, Buffers, Done, Floats, Ints, Pass, PassShape, Segment
from hetrun.backends.llamacpp import fusion, native
from hetrun.backends.llamacpp.emit import Emitter
from hetrun.backends.llamacpp.fusion import Fused, Product, Rotation
from hetrun.backends.llamacpp.inputs import Inputs, Mask
from hetrun.backends.llamacpp.native import DATA, NB, NE
from hetrun.backends.llamacpp.writer import Ref, Writer
from hetrun.kv import KvCache

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.device import LlamacppBackend

NODES_PER_OP = 6
NODES_PER_ATTENTION = 14
MASKED = np.float16(-np.inf)
C_TYPES = {native.I32: ctypes.c_int32, native.I64: ctypes.c_int64}


class GgmlRunner:
    """A segment as one ggml graph."""

    def __init__(
        self, backend: LlamacppBackend, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache
    ) -> None:
        self._backend = backend
        self._lib = backend.lib
        attentions = sum(op.kind == "attention" for op in segment.ops)
        nodes = 64 + NODES_PER_OP * len(segment.ops) + NODES_PER_ATTENTION * attentions * len(shape.parts)
        self._w = Writer(self._lib, shape, nodes)
        emitter = Emitter(self._w, buffers, kv)
        self._inputs: Inputs = emitter.inputs
        outputs = self._write(emitter, segment, shape)
        self._allocator = self._w.allocate()
        self._vectors = _vectors(self._inputs)
        self._reads = {name: _matrix(ref) for name, ref in self._inputs.values.items()}
        self._writes = {name: _matrix(ref) for name, ref in outputs.items()}
        self._windows = Windows(self._w, self._inputs, len(shape.parts))
        self._masks = [MaskFiller(self._w, m) for m in self._inputs.masks.values()]
        size = self._lib.ggml_gallocr_get_buffer_size(self._allocator, 0)
        backend.book(self, size + self._w.memory.nbytes)

    def _write(self, e: Emitter, segment: Segment, shape: PassShape) -> dict[str, Ref]:
        for value in segment.reads:
            if value.rows == "tokens" or shape.wanted:
                e.read(value)
        for item in fusion.fuse(segment.ops):
            if shape.wanted or _has_token_rows(item):
                e.emit(item)
        kept = {v.name: e.w.keep(e.values[v]) for v in segment.writes if v.rows == "tokens" or shape.wanted}
        return kept

    def submit(self, work: Pass) -> Done:
        """Fill the inputs in, compute, give the results: arrays in ggml's memory, good until the next run."""
        for array, rows_of in self._vectors:
            array[:] = rows_of(work)
        for name, array in self._reads.items():
            array[:] = work.values[name]
        self._windows.patch(work)
        for mask in self._masks:
            mask.fill(work)
        self._backend.compute(self._w.graph)
        work.values.update(self._writes)
        return FINISHED

    def close(self) -> None:
        """Give the graph's memory back."""
        self._lib.ggml_gallocr_free(self._allocator)
        self._lib.ggml_free(self._w.context)
        self._backend.unbook(self)


def _has_token_rows(item: Fused) -> bool:
    """Whether an op must run even if nobody wants a row: attention fills the cache all the same."""
    ops = item.ops if isinstance(item, (Product, Rotation)) else (item,)
    return any(op.kind == "attention" or op.out.rows == "tokens" for op in ops)


class Windows:
    """Points the KV views of a graph at what each sequence has seen."""

    def __init__(self, w: Writer, inputs: Inputs, n_parts: int) -> None:
        self._memory = w.memory
        self._parts = []
        for part in range(n_parts):
            mine = [s for s in inputs.kv if s.part == part]
            data = np.array([w.word(s.tensor, DATA) for s in mine], np.int64)
            length = np.array([w.word(s.tensor, NE[1]) for s in mine], np.int64)
            base = np.array([s.table.address for s in mine], np.int64)
            stride = np.array([s.table.row_bytes for s in mine], np.int64)
            self._parts.append((data, length, base, stride))

    def patch(self, work: Pass) -> None:
        """Before a run."""
        for (data, length, base, stride), part in zip(self._parts, work.parts, strict=True):
            if len(data):
                first = part.kv.first
                self._memory[data] = base + first * stride
                self._memory[length] = part.kv.end - first


class MaskFiller:
    """Keeps the memory of one sequence's mask and fills it."""

    def __init__(self, w: Writer, mask: Mask) -> None:
        self._memory = w.memory
        self._mask = mask
        self._rows = native.tensor_at(mask.tensor).ne[1]
        self._words = [w.word(mask.tensor, f) for f in (DATA, NE[0], NB[1], NB[2], NB[3])]
        self._bits = np.empty(0, np.float16)

    def fill(self, work: Pass) -> None:
        """Before a run: row i of a sequence sees everything up to its own position."""
        part = work.parts[self._mask.part]
        first, width = part.kv.first, part.kv.end - part.kv.first
        if self._bits.size < self._rows * width:
            self._bits = np.empty(self._rows * -(-width // 256) * 256, np.float16)
        bits = self._bits[: self._rows * width].reshape(self._rows, width)
        own = (
            np.arange(part.b - part.a)
            if self._mask.rows == "tokens"
            else work.wanted[part.wanted_a : part.wanted_b] - part.a
        )
        seen = own + (part.kv.length - (part.b - part.a) + 1)
        if part.kv.contiguous:
            bits[:] = np.where(np.arange(width) < seen[:, None], np.float16(0), MASKED)
        else:
            bits[:] = MASKED
            columns = part.kv.rows - first
            for row, n in zip(bits, seen, strict=True):
                row[columns[:n]] = 0
        row_bytes = width * 2
        whole = row_bytes * self._rows
        self._memory[self._words] = (self._bits.ctypes.data, width, row_bytes, whole, whole)


def _vectors(inputs: Inputs) -> list[tuple[NDArray[Any], Callable[[Pass], Ints]]]:
    """The memory of the graph's input vectors, and what goes into each."""
    sources: list[tuple[int, Callable[[Pass], Ints]]] = [
        (inputs.tokens, lambda work: work.tokens),
        (inputs.slots, lambda work: work.slots),
        (inputs.wanted, lambda work: work.wanted),
        (inputs.positions.get("tokens", 0), lambda work: work.positions),
        (inputs.positions.get("wanted", 0), lambda work: work.positions[work.wanted]),
    ]
    return [(_vector(tensor), source) for tensor, source in sources if tensor]


def _vector(tensor: int) -> NDArray[Any]:
    fields = native.tensor_at(tensor)
    return np.ctypeslib.as_array((C_TYPES[fields.type] * fields.ne[0]).from_address(fields.data))


def _matrix(ref: Ref) -> Floats:
    fields = native.tensor_at(ref.tensor)
    flat = np.ctypeslib.as_array((ctypes.c_float * (ref.rows * ref.width)).from_address(fields.data))
    return flat.reshape(ref.rows, ref.width)
