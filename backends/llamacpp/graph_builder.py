"""Writes one ggml graph, its tensors in memory of ours: it can be patched from numpy between two runs.

A graph depends on how many tokens each sequence brings, not on how much the sequence has seen: the KV views
and masks get their addresses and lengths before each run. So one graph serves a whole answer.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import PassShape
from hetrun.backends.llamacpp import ggml_api
from hetrun.backends.llamacpp.ggml_api import OBJECT_BYTES, GgmlLibrary, GgmlTensor
from hetrun.errors import BackendError

FLOAT = 4
TENSOR_BYTES = OBJECT_BYTES + ctypes.sizeof(GgmlTensor)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A value in the graph: `width` columns from `offset` bytes on in the rows of a tensor."""

    tensor: int
    width: int
    rows: int
    stride: int
    offset: int = 0
    partial: bool = False  # not all rows of the tensor

    @property
    def whole(self) -> bool:
        """Whether it is the tensor itself."""
        return self.stride == self.width * FLOAT and not self.partial

    def columns(self, a: int, b: int) -> TensorRef:
        """Columns a to b."""
        return replace(self, width=b - a, offset=self.offset + a * FLOAT)

    def part(self, a: int, b: int) -> TensorRef:
        """Rows a to b."""
        partial = self.partial or b - a < self.rows
        return replace(self, rows=b - a, offset=self.offset + a * self.stride, partial=partial)


class Writer:
    """A ggml context and graph under construction."""

    def __init__(self, lib: GgmlLibrary, shape: PassShape, nodes: int) -> None:
        self.lib = lib
        self.shape = shape
        size = nodes * TENSOR_BYTES + lib.ggml_graph_overhead_custom(nodes, False) + 4096
        self.memory: NDArray[np.int64] = np.zeros(size // 8 + 8, np.int64)
        self._base = -(-self.memory.ctypes.data // 16) * 16
        self.context = lib.ggml_init(ggml_api.InitParams(size, self._base, True))
        self.graph = lib.ggml_new_graph_custom(self.context, nodes, False)
        self.anchor = np.zeros(64, np.uint8)  # a harmless address for what gets its own before each run

    def word(self, tensor: int, field: int) -> int:
        """The index in `memory` of a field of a tensor."""
        return (tensor - self.memory.ctypes.data) // 8 + field

    def input(self, ggml_type: int, n: int) -> int:
        """A vector that is filled before each run."""
        tensor: int = self.lib.ggml_new_tensor_1d(self.context, ggml_type, n)
        self.lib.ggml_set_input(tensor)
        return tensor

    def matrix(self, width: int, rows: int) -> TensorRef:
        """A float matrix that keeps its memory through the whole run."""
        tensor = self.lib.ggml_new_tensor_2d(self.context, ggml_api.F32, width, rows)
        self.lib.ggml_set_input(tensor)
        return TensorRef(tensor, width, rows, width * FLOAT)

    def external(self, ggml_type: int, width: int, rows: int, address: int, stride: int | None = None) -> int:
        """A matrix in memory that is not ggml's."""
        tensor: int = self.lib.ggml_new_tensor_2d(self.context, ggml_type, width, rows)
        fields = ggml_api.tensor_at(tensor)
        fields.data = address
        if stride is not None:
            fields.nb[1] = stride
            fields.nb[2] = fields.nb[3] = stride * rows
        return tensor

    def result(self, tensor: int, width: int, rows: int) -> TensorRef:
        """The value that an op made, which holds its rows one behind the other."""
        return TensorRef(tensor, width, rows, width * FLOAT)

    def plain(self, ref: TensorRef) -> int:
        """A value as a matrix, which may have a stride between its rows."""
        if ref.whole:
            return ref.tensor
        tensor: int = self.lib.ggml_view_2d(
            self.context, ref.tensor, ref.width, ref.rows, ref.stride, ref.offset
        )
        return tensor

    def heads(self, ref: TensorRef, head_dim: int) -> int:
        """A value as [head_dim, heads, rows]."""
        heads = ref.width // head_dim
        tensor: int = self.lib.ggml_view_3d(
            self.context, ref.tensor, head_dim, heads, ref.rows, head_dim * FLOAT, ref.stride, ref.offset
        )
        return tensor

    def expand(self, tensor: int) -> None:
        """Put a tensor and what it needs behind everything that is in the graph already."""
        self.lib.ggml_build_forward_expand(self.graph, tensor)

    def keep(self, ref: TensorRef) -> TensorRef:
        """Keep a value's memory to the end of the run, so that it can be read."""
        if not ref.whole:
            tensor = self.lib.ggml_cont(self.context, self.plain(ref))
            ref = self.result(tensor, ref.width, ref.rows)
        self.lib.ggml_set_output(ref.tensor)
        self.expand(ref.tensor)
        return ref

    def allocate(self) -> int:
        """Give the graph's own tensors memory; returns the allocator, which owns it."""
        allocator: int = self.lib.ggml_gallocr_new(self.lib.ggml_backend_cpu_buffer_type())
        if not self.lib.ggml_gallocr_alloc_graph(allocator, self.graph):
            self.lib.ggml_gallocr_free(allocator)
            raise BackendError(
                f"ggml could not allocate a graph for {self.shape.tokens} tokens; use a smaller --ubatch"
            )
        return allocator
