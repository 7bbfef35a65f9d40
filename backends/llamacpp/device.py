"""The backend: it compiles segments into ggml graphs and runs each with one native call."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import FINISHED, Backend, Buffers, Done, Floats, Pass, PassShape, ReadInto, Runner, Segment, WeightUse
from hetrun.backends.llamacpp import fusion, native
from hetrun.backends.llamacpp.emit import KINDS, Emitter, Inputs, Mask
from hetrun.backends.llamacpp.fusion import Fused, Product, Rotation
from hetrun.backends.llamacpp.memory import GgmlBuffer, WeightMemory
from hetrun.backends.llamacpp.native import DATA, NB, NE
from hetrun.backends.llamacpp.writer import Ref, Writer
from hetrun.errors import BackendError, Cancelled
from hetrun.graph import Op, Value
from hetrun.kv import KvCache

NODES_PER_OP = 6
NODES_PER_ATTENTION = 14
MASKED = np.float16(-np.inf)


class LlamacppBackend(Backend):
    """ggml on the CPU."""

    name = "llamacpp"

    def __init__(self) -> None:
        self.lib = native.library()
        self._backend = self.lib.ggml_backend_cpu_init()
        if not self._backend:
            raise BackendError("ggml could not start its CPU backend")
        # ggml asks after each node whether to stop. libc's strlen of this string is the answer (0 or 1):
        # a C function, so that no thread of ggml ever enters the interpreter.
        self._stop = ctypes.create_string_buffer(2)
        strlen = native.libc_address("strlen")
        self.lib.ggml_backend_cpu_set_abort_callback(self._backend, strlen, ctypes.addressof(self._stop))
        self._memory = WeightMemory(self.lib)
        self._graph_bytes: dict[int, int] = {}
        self.set_threads(os.cpu_count() or 1)

    def supports(self, op: Op) -> bool:
        return op.kind in KINDS

    def wants(self, ops: Sequence[Op]) -> tuple[WeightUse, ...]:
        return fusion.wants(ops)

    def upload(self, wanted: WeightUse, read: ReadInto) -> GgmlBuffer:
        return self._memory.upload(wanted, read)

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        return GgmlRunner(self, segment, shape, buffers, kv)

    def set_threads(self, threads: int) -> None:
        self.lib.ggml_backend_cpu_set_n_threads(self._backend, threads)

    def cancel(self) -> None:
        self._stop[0] = b"\x01"

    def rearm(self) -> None:
        self._stop[0] = b"\x00"

    @property
    def overhead_bytes(self) -> int:
        return sum(self._graph_bytes.values())

    def book(self, runner: GgmlRunner, nbytes: int) -> None:
        """Count the memory of a compiled graph."""
        self._graph_bytes[id(runner)] = nbytes

    def unbook(self, runner: GgmlRunner) -> None:
        """The graph is gone."""
        self._graph_bytes.pop(id(runner), None)

    def compute(self, graph: int) -> None:
        """Run a graph to its end, or to a cancel."""
        start = perf_counter()
        status = self.lib.ggml_backend_graph_compute(self._backend, graph)
        self.native_seconds += perf_counter() - start
        if status == native.ABORTED:
            raise Cancelled("the computation was stopped")
        if status != native.SUCCESS:
            raise BackendError(f"ggml ended a graph with status {status}: out of memory for its work buffer")

    def close(self) -> None:
        self._memory.close()
        if self._backend:
            self.lib.ggml_backend_free(self._backend)
            self._backend = None


class GgmlRunner:
    """A segment as one ggml graph."""

    def __init__(self, backend: LlamacppBackend, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> None:
        self._backend = backend
        self._lib = backend.lib
        attentions = sum(op.kind == "attention" for op in segment.ops)
        nodes = 64 + NODES_PER_OP * len(segment.ops) + NODES_PER_ATTENTION * attentions * len(shape.parts)
        self._w = Writer(self._lib, shape, nodes)
        emitter = Emitter(self._w, buffers, kv)
        self._inputs: Inputs = emitter.inputs
        outputs = self._write(emitter, segment, shape)
        self._allocator = self._w.allocate()
        self._tokens = _vector(self._inputs.tokens, np.int32)
        self._slots = _vector(self._inputs.slots, np.int64)
        self._wanted = _vector(self._inputs.wanted, np.int32)
        self._positions = {rows: _vector(t, np.int32) for rows, t in self._inputs.positions.items()}
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
        """Fill the inputs in, compute, and offer the results: arrays in ggml's memory, good until the next run."""
        if self._tokens is not None:
            self._tokens[:] = work.tokens
        if self._slots is not None:
            self._slots[:] = work.slots
        if self._wanted is not None:
            self._wanted[:] = work.wanted
        for rows, target in self._positions.items():
            target[:] = work.positions if rows == "tokens" else work.positions[work.wanted]
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
        if self._allocator:
            self._lib.ggml_gallocr_free(self._allocator)
            self._lib.ggml_free(self._w.context)
            self._backend.unbook(self)
            self._allocator = None


def _has_token_rows(item: Fused) -> bool:
    """Whether an op must run even if nobody wants a row: attention fills the cache whatever its queries are."""
    ops = item.ops if isinstance(item, (Product, Rotation)) else (item,)
    return any(op.kind == "attention" or _rows(op.out) == "tokens" for op in ops)


def _rows(value: Value) -> str:
    return value.rows


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
        own = np.arange(part.b - part.a) if self._mask.rows == "tokens" else work.wanted[part.wanted_a : part.wanted_b] - part.a
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


def _vector(tensor: int, dtype: type[np.int32] | type[np.int64]) -> NDArray[np.int32] | NDArray[np.int64] | None:
    """An input vector's memory; None where the graph does not have it (or ggml gave it none: nothing reads it)."""
    if not tensor:
        return None
    fields = native.tensor_at(tensor)
    c_type = ctypes.c_int32 if dtype is np.int32 else ctypes.c_int64
    return np.ctypeslib.as_array((c_type * fields.ne[0]).from_address(fields.data))


def _matrix(ref: Ref) -> Floats:
    fields = native.tensor_at(ref.tensor)
    flat = np.ctypeslib.as_array((ctypes.c_float * (ref.rows * ref.width)).from_address(fields.data))
    return flat.reshape(ref.rows, ref.width)
