"""Attention by our own kernel: few query rows of each sequence, all sequences of a pass in one node; many
rows of a sequence in several nodes, one behind the other.

ggml's attention takes a node for each sequence and layer, and goes through the keys once for each query row.
The kernel reads each key and value once, for all query heads that share it, at about the speed of memory.
What it has to know of a pass is patched before each run, as for ggml's own nodes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_void_p
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import Floats, Ints, Pass
from hetrun.backends.llamacpp import ggml_api, kernels
from hetrun.backends.llamacpp.graph_builder import FLOAT, TensorRef
from hetrun.backends.llamacpp.kernels import AttentionLayer, Kernels, PassPart
from hetrun.graph import Rows
from hetrun.graph.ops import Attention
from hetrun.memory.kv.cache import KvTable

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.lowering import GgmlEmitter

Span = tuple[int, tuple[int, int]]  # a sequence of a pass, and its first and last query row, or some of them

ALL_THREADS = -1
CACHE_LINE = 64
SEEN = 3  # numbers of a sequence that change from pass to pass
MOST_ROWS = 32  # of a sequence in one node: what it works in grows with them


def pieces(span: Span) -> Iterator[Span]:
    """Many query rows of a sequence, in parts that the kernel takes one after the other."""
    part, (lo, hi) = span
    return ((part, (at, min(at + MOST_ROWS, hi))) for at in range(lo, hi, MOST_ROWS))


def takes(lib: Kernels | None, table: KvTable) -> bool:
    """Whether there is a kernel for keys and values like these."""
    return lib is not None and table.quant.ggml_id in kernels.TYPES


def takes_many(lib: Kernels | None, table: KvTable, is_tiled: bool) -> bool:
    """Whether it is faster than ggml with many query rows, too: 1.2 to 1.7 times over a prompt of 4000 tokens
    where ggml has tiles for the type, and else far more. Without wide vectors such tiles are faster."""
    return lib is not None and takes(lib, table) and (lib.is_wide or not is_tiled)


@dataclass(slots=True)
class AttentionNode:
    """The kernel's node in one layer."""

    layer: AttentionLayer
    queries: int  # tensors
    result: int


@dataclass(slots=True)
class Common:
    """What the nodes of layers that see equally far have in common."""

    group: int
    window: int
    rows: Rows
    spans: tuple[Span, ...]
    query_rows: int
    nodes: list[AttentionNode] = field(default_factory=list)
    part: PassPart = field(default_factory=PassPart)


def attend(
    e: GgmlEmitter,
    a: Attention,
    rows: Rows,
    q: TensorRef,
    spans: Sequence[Span],
    whole: TensorRef | None,
    sinks: int,
) -> TensorRef:
    """One node for these sequences: the whole result, or their rows of `whole`."""
    assert e.kernels is not None
    group = e.kv.group(a.layer)
    keys, values = e.kv.heads(a.layer, a.first, a.n_kv_heads)
    if e.shape.wanted == e.shape.tokens:
        rows = "tokens"  # the same ones: the last layer has its tables in common with the others
    key = (group, rows, tuple(spans))
    if key not in e.inputs.few:
        e.inputs.few[key] = Common(group, e.kv.groups[group].window, rows, tuple(spans), q.rows)
    common = e.inputs.few[key]
    layer = AttentionLayer(
        pass_part=ctypes.pointer(common.part),
        keys=keys.address,
        values=values.address,
        key_stride=keys.row_bytes,
        value_stride=values.row_bytes,
        head_bytes=keys.quant.row_bytes(a.head_dim),
        type=keys.quant.ggml_id,
        head_dim=a.head_dim,
        heads=a.n_heads,
        kv_heads=a.n_kv_heads,
        query_stride=q.stride // FLOAT,
        out_stride=a.n_heads * a.head_dim,
        slots=e.slots,
        level=e.kernels.level,
        scale=a.scale,
        softcap=a.softcap,
        sinks=ggml_api.tensor_at(sinks).data if sinks else None,
    )
    queries = e.w.plain(q)
    sources = (c_void_p * 1)(queries)
    function = (e.kernels.address, ALL_THREADS, ctypes.addressof(layer))
    if whole is None:
        width = a.n_heads * a.head_dim
        result = e.lib.ggml_custom_4d(e.ctx, ggml_api.F32, width, q.rows, 1, 1, sources, 1, *function)
        made = e.w.result(result, width, q.rows)
    else:
        result = e.lib.ggml_custom_inplace(e.ctx, whole.tensor, sources, 1, *function)
        made = whole
    e.w.expand(result)
    common.nodes.append(AttentionNode(layer, queries, result))
    return made


class DecodeNodes:
    """The memory of a graph's nodes of few rows, and what they have to know of a pass.

    Nodes run one after the other, and share what they work in."""

    def __init__(
        self, lib: Kernels | None, commons: Sequence[Common], shape: Sequence[tuple[int, int]]
    ) -> None:
        self._parts = [SharedPassPart(lib, common, shape) for common in commons if lib is not None]
        self._scratch = _Scratch(lib, self._parts) if lib and self._parts else None
        self._memory = _floats(0)

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return self._memory.nbytes + (self._scratch.nbytes if self._scratch else 0)

    def patch(self, work: Pass) -> bool:
        """Before a run; returns whether more memory was taken."""
        needed = max((part.patch(work) for part in self._parts), default=0)
        if self._memory.size >= needed:
            return False
        self._memory = _floats(needed * 5 // 4)  # sequences grow
        for part in self._parts:
            part.common.part.memory = self._memory.ctypes.data
        return True


class SharedPassPart:
    """The part of a pass that some layers have in common, in the kernel's words."""

    def __init__(self, lib: Kernels, common: Common, shape: Sequence[tuple[int, int]]) -> None:
        self._lib, self.common = lib, common
        self.layers = layers = [node.layer for node in common.nodes]
        self._numbers = [i for i, _ in common.spans]
        spans = np.array([span for _, span in common.spans], np.int64)
        tokens = np.array([shape[i][0] for i in self._numbers], np.int64)
        starts = np.cumsum([0, *(n for n, _ in shape)])
        self._firsts = starts[self._numbers]  # of each sequence, the first token in the pass
        self._lasts = self._firsts + tokens - 1
        counts = spans[:, 1] - spans[:, 0]
        self._sequences = np.zeros((len(spans), kernels.FIELDS), np.int64)
        self._sequences[:, 3], self._sequences[:, 4] = spans[:, 0], counts
        # For each query row its sequence and the number of its token there, where that does not change.
        self._of = np.repeat(np.arange(len(spans)), counts)
        self._rows = np.concatenate([np.arange(a, b) for a, b in spans])
        # Rows of all tokens are numbered as these are.
        own = self._rows - self._firsts[self._of] if common.rows == "tokens" else 0
        self._behind = own - tokens[self._of] + 1
        self._unseen = self._lasts + 1 - spans[:, 1] if common.rows == "tokens" else 0
        self._ends = np.zeros(common.query_rows, np.int64)
        self.most_rows = int(counts.max())
        self._counters = np.zeros(2 + len(spans) * max(layer.kv_heads for layer in layers), np.int32)
        self._partial: int = max(layer.heads * kernels.partial_size(layer.head_dim) for layer in layers)
        # What another segment of a pass has found out of it.
        self._key = common.group, common.rows, common.spans, tuple(shape)
        part = common.part
        part.n, part.window = len(spans), common.window
        part.sequences, part.ends = self._sequences.ctypes.data, self._ends.ctypes.data
        part.counters = self._counters.ctypes.data
        for node in common.nodes:
            node.layer.queries = ggml_api.tensor_at(node.queries).data
            node.layer.out = ggml_api.tensor_at(node.result).data

    def patch(self, work: Pass) -> int:
        """Before a run; returns how many floats its nodes need for what they put aside."""
        found: tuple[Ints, Ints] | None = work.worked_out.get(self._key)
        if found is None:
            found = work.worked_out[self._key] = self._look(work)
        self._sequences[:, :SEEN], self._ends[:] = found
        self._counters[:] = 0
        return self._lib.plan(self.common.part) * self._partial

    def _look(self, work: Pass) -> tuple[Ints, Ints]:
        """What sequences are like, and where each query row's keys end."""
        common = self.common
        views = [work.parts[i].kv[common.group] for i in self._numbers]
        lengths = np.array([view.length for view in views], np.int64)
        sequences, ends = np.empty((len(views), SEEN), np.int64), np.zeros_like(self._ends)
        sequences[:, 0] = [view.first for view in views]
        sequences[:, 1] = lengths - self._unseen
        sequences[:, 2] = work.positions[self._lasts] + 1 - lengths
        behind = lengths[self._of] + self._behind
        if common.rows == "wanted":
            behind += work.wanted[self._rows] - self._firsts[self._of]
        ends[self._rows] = behind
        return sequences, ends


class _Scratch:
    """What each thread works in."""

    def __init__(self, lib: Kernels, parts: Sequence[SharedPassPart]) -> None:
        layers = [(part.most_rows, layer) for part in parts for layer in part.layers]
        sizes = (lib.scratch(rows, x.heads, x.kv_heads, x.head_dim) for rows, x in layers)
        line = CACHE_LINE // FLOAT
        size = -(-max(sizes) // line) * line
        self._memory = _floats(size * max(layer.slots for _, layer in layers))
        self.nbytes = self._memory.nbytes
        for _, layer in layers:
            layer.scratch, layer.scratch_size = self._memory.ctypes.data, size


def _floats(n: int) -> Floats:
    """Memory that begins with a cache line."""
    raw: NDArray[np.uint8] = np.empty(n * FLOAT + CACHE_LINE, np.uint8)
    skip = -raw.ctypes.data % CACHE_LINE
    return raw[skip : skip + n * FLOAT].view(np.float32)
