"""A compiled segment: what is filled in before each run, and the run."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hetrun.backend import FINISHED, Buffers, Done, Floats, Ints, Pass, PassShape, Segment, sees_whole
from hetrun.backend.fusion import has_token_rows
from hetrun.backends.llamacpp import fusion, ggml_api
from hetrun.backends.llamacpp.attention_layout import TILE
from hetrun.backends.llamacpp.decode_attention import DecodeNodes
from hetrun.backends.llamacpp.delta_net import PassSlots
from hetrun.backends.llamacpp.epilogues import join
from hetrun.backends.llamacpp.ggml_api import DATA, NB, NE
from hetrun.backends.llamacpp.graph_builder import TensorRef, Writer
from hetrun.backends.llamacpp.inputs import Inputs, Mask
from hetrun.backends.llamacpp.lowering import GgmlEmitter, most_tensors
from hetrun.backends.llamacpp.mixture import expert_stats
from hetrun.backends.llamacpp.mixture.partial_moe import GraphLeftovers
from hetrun.backends.llamacpp.packed_matmul import PackedProducts
from hetrun.backends.llamacpp.page_in import connect
from hetrun.backends.llamacpp.preemption import GraphPieces
from hetrun.graph import Rows
from hetrun.graph.ops import Grow
from hetrun.memory.kv.cache import KvCache

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.backend import LlamacppBackend

MASKED = np.float16(-np.inf)
C_TYPES = {ggml_api.F32: ctypes.c_float, ggml_api.I32: ctypes.c_int32, ggml_api.I64: ctypes.c_int64}


class GgmlRunner:
    """A segment as one ggml graph."""

    def __init__(
        self, backend: LlamacppBackend, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache
    ) -> None:
        self._backend = backend
        self._head = any(op.kind == "head" for op in segment.ops)
        self._lib = backend.lib
        self._w = Writer(self._lib, shape, most_tensors(segment.ops, shape))
        emitter = GgmlEmitter(self._w, buffers, kv, backend, segment.ops)
        self._inputs: Inputs = emitter.inputs
        outputs = self._write(emitter, segment, shape)
        self._allocator = self._w.allocate()
        self._pieces: GraphPieces | None = None
        self._vectors = _vectors(self._inputs)
        # What nothing reads in a pass of this shape has no memory.
        read = {n: ref for n, ref in self._inputs.values.items() if ggml_api.tensor_at(ref.tensor).data}
        self._reads = {name: _matrix(ref) for name, ref in read.items()}
        self._writes = {name: _matrix(ref) for name, ref in outputs.items()}
        self._seen = SeenRows(self._w, self._inputs)
        self._padding = Padding(self._w, self._inputs)
        self._masks = [MaskFiller(self._w, m) for m in self._inputs.masks.values()]
        self._few = DecodeNodes(backend.kernels, list(self._inputs.few.values()), shape.parts)
        self._slots = PassSlots(backend.delta_nets, self._inputs.states, shape.parts)
        self._products = PackedProducts(
            backend.products, self._inputs.products, self._inputs.lookups, backend.slots
        )
        connect(self._inputs.brought)
        for hint in self._inputs.hints:
            hint.point()
        self._leaving = GraphLeftovers(self._w, self._inputs.sorted, self._inputs.leaves)
        self._chosen = expert_stats.views(self._inputs.chosen)
        self._book()

    def _book(self) -> None:
        graph = self._lib.ggml_gallocr_get_buffer_size(self._allocator, 0) + self._w.memory.nbytes
        self._backend.book(self, graph + self._few.nbytes + self._slots.nbytes + self._products.nbytes)

    def _write(self, e: GgmlEmitter, segment: Segment, shape: PassShape) -> dict[str, TensorRef]:
        for value in segment.reads:
            if value.rows == "tokens" or shape.wanted:
                e.read(value)
        for item in join(fusion.fuse(segment.ops), segment.writes, self._backend.packs):
            if shape.wanted or has_token_rows(fusion.members(item)):
                e.emit(item)
        kept = {v.name: e.w.keep(e.values[v]) for v in segment.writes if v.rows == "tokens" or shape.wanted}
        return kept

    def submit(self, work: Pass) -> Done:
        """Fill the inputs in, compute, give the results: arrays in ggml's memory, good until the next run."""
        for array, rows_of in self._vectors:
            array[:] = rows_of(work)
        for name, array in self._reads.items():
            array[:] = work.values[name]
        self._seen.patch(work)
        self._padding.patch(work)
        self._leaving.patch(work)
        self._slots.patch(work)
        for mask in self._masks:
            mask.fill(work)
        if self._few.patch(work):
            self._book()
        self._compute(work)
        work.values.update(self._writes)
        if work.chosen:
            for router, chosen in self._chosen.items():
                work.chosen(router, chosen)
        return FINISHED

    def _compute(self, work: Pass) -> None:
        """The graph as one call; where others wait for the thread, piece by piece."""
        if self._products.partial:
            self._backend.compute_from_disk(self._w.graph, bool(len(work.wanted)), self._head)
            return
        if self._inputs.cached:
            self._backend.compute_with_experts(self._w.graph, len(work.tokens))
            return
        if work.between is None:
            self._backend.compute(self._w.graph)
            return
        self._pieces = self._pieces or GraphPieces(self._lib, self._w.graph)
        for i, piece in enumerate(self._pieces):
            if i:
                work.between()
            self._backend.compute(piece)

    def close(self) -> None:
        """Give the graph's memory back."""
        self._lib.ggml_gallocr_free(self._allocator)
        self._lib.ggml_free(self._w.context)
        self._backend.unbook(self)


class SeenRows:
    """Points the KV views of a graph at what each sequence sees."""

    def __init__(self, w: Writer, inputs: Inputs) -> None:
        self._memory = w.memory
        self._slices = []
        for part, group in sorted({(s.part, s.group) for s in inputs.kv}):
            mine = [s for s in inputs.kv if (s.part, s.group) == (part, group)]
            data = np.array([w.word(s.tensor, DATA) for s in mine], np.int64)
            length = np.array([w.word(s.tensor, NE[1]) for s in mine], np.int64)
            base = np.array([s.table.address for s in mine], np.int64)
            stride = np.array([s.table.row_bytes for s in mine], np.int64)
            self._slices.append((part, group, data, length, base, stride))

    def patch(self, work: Pass) -> None:
        """Before a run."""
        for part, group, data, length, base, stride in self._slices:
            view = work.parts[part].kv[group]
            self._memory[data] = base + view.first * stride
            self._memory[length] = view.length


class Padding:
    """Has ggml compute the zeros behind query rows, and so take tiles, or leaves them out.

    Tiles pay once there are more keys than one has; before that, single rows skip what they do not see.
    """

    def __init__(self, w: Writer, inputs: Inputs) -> None:
        self._memory = w.memory
        words: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
        for p in inputs.padded:
            words[p.part, p.group, p.own, p.rows] += w.word(p.queries, NE[1]), w.word(p.result, NE[2])
        self._padded = [(*key, np.array(found)) for key, found in words.items()]

    def patch(self, work: Pass) -> None:
        """Before a run."""
        for part, group, own, rows, words in self._padded:
            view = work.parts[part].kv[group]
            self._memory[words] = rows if view.length > TILE else own


class MaskFiller:
    """Keeps the memory of one sequence's mask and fills it."""

    def __init__(self, w: Writer, mask: Mask) -> None:
        self._memory = w.memory
        self._mask = mask
        self._rows = ggml_api.tensor_at(mask.tensor).ne[1]
        self._words = [w.word(mask.tensor, f) for f in (DATA, NE[0], NB[1], NB[2], NB[3])]
        self._bits = np.empty(0, np.float16)

    def fill(self, work: Pass) -> None:
        """Before a run: row i of a sequence sees everything up to its own position, or a window of it."""
        part = work.parts[self._mask.part]
        view = part.kv[self._mask.group]
        width = view.length
        if self._bits.size < self._rows * width:
            self._bits = np.empty(self._rows * -(-width // 256) * 256, np.float16)
        own = (
            np.arange(part.b - part.a)
            if self._mask.rows == "tokens"
            else work.wanted[part.wanted_a : part.wanted_b] - part.a
        )
        ends = own + (view.length - (part.b - part.a) + 1)
        filled = len(ends) * self._mask.times
        bits = self._bits[: self._rows * width].reshape(self._rows, width)
        bits[filled:] = MASKED
        each = bits[:filled].reshape(len(ends), self._mask.times, width)
        window = self._mask.window
        whole_pass = sees_whole(work.whole, window)
        each[:] = _bands(width, min(window or width, width), ends, whole_pass)[:, None]
        row_bytes = width * 2
        whole = row_bytes * self._rows
        self._memory[self._words] = (self._bits.ctypes.data, width, row_bytes, whole, whole)


def _bands(width: int, window: int, ends: Ints, whole: bool) -> NDArray[np.float16]:
    """Rows of a mask that show the last `window` columns before each end, or with `whole` also all from there
    on: all are pieces of one long row."""
    hidden = np.full(width, MASKED)
    row = np.concatenate((hidden, np.zeros(window, np.float16), np.zeros_like(hidden) if whole else hidden))
    return sliding_window_view(row, width)[width + window - ends]


def _vectors(inputs: Inputs) -> list[tuple[NDArray[Any], Callable[[Pass], Ints | Floats]]]:
    """The memory of the graph's input vectors, and what goes into each."""
    sources: list[tuple[int, Callable[[Pass], Ints | Floats]]] = [
        (inputs.tokens, lambda work: work.tokens),
        *((tensor, _slots(group)) for group, tensor in inputs.slots.items()),
        (inputs.wanted, lambda work: work.wanted),
        *((tensor, _positions(*key)) for key, tensor in inputs.positions.items()),
        *((tensor, _growth(*key)) for key, tensor in inputs.growth.items()),
    ]
    return [(_vector(tensor), source) for tensor, source in sources if tensor]


def _positions(rows: Rows, offset: int, axis: int | None) -> Callable[[Pass], Ints]:
    def all_of(work: Pass) -> Ints:
        return (work.positions if axis is None else work.along(axis)) + offset

    return all_of if rows == "tokens" else lambda work: all_of(work)[work.wanted]


def _growth(rows: Rows, a: Grow) -> Callable[[Pass], Floats]:
    return lambda work: a.growth(work.along(0, rows))


def _slots(group: int) -> Callable[[Pass], Ints]:
    return lambda work: work.slots[group]


def _vector(tensor: int) -> NDArray[Any]:
    fields = ggml_api.tensor_at(tensor)
    return np.ctypeslib.as_array((C_TYPES[fields.type] * fields.ne[0]).from_address(fields.data))


def _matrix(ref: TensorRef) -> Floats:
    fields = ggml_api.tensor_at(ref.tensor)
    flat = np.ctypeslib.as_array((ctypes.c_float * (ref.rows * ref.width)).from_address(fields.data))
    return flat.reshape(ref.rows, ref.width)
