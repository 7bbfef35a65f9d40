"""A graph in pieces that are computed one after the other, so that others can have the thread in between.

The pieces look at the same nodes in the same memory: together they are the whole graph, to the last bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Protocol

from hetrun.backends.llamacpp import ggml_api
from hetrun.backends.llamacpp.ggml_api import GgmlLibrary, GgmlTensor

PIECE_S = 1e-3  # of each piece, where products and attention are no longer
# What an ordinary CPU does in a second. Pieces need not be equal, so about is enough.
MULTIPLICATIONS, BYTES = 200e9, 20e9
ATTENTION_S = 1e-7  # for each number that attention gives; how many tokens it sees is not known here
PRODUCTS = ("MUL_MAT", "MUL_MAT_ID", ggml_api.PRODUCT)
ATTENTION = ("FLASH_ATTN_EXT", "CUSTOM")


class View(ctypes.Structure):
    """A struct ggml_cgraph that ggml filled in. What is in it is ggml's own; it is 80 bytes in the tested
    versions, and there is room for more."""

    _fields_ = (("words", ctypes.c_uint64 * 32),)


class Viewer(Protocol):
    """ggml_graph_view: some neighbouring nodes of a graph as a graph."""

    def __call__(self, graph: int, first: int, end: int) -> View: ...


class GraphPieces:
    """A graph that has its memory, as graphs of its nodes in order: itself where ggml cannot show pieces."""

    def __init__(self, lib: GgmlLibrary, graph: int) -> None:
        nodes = [
            ggml_api.tensor_at(lib.ggml_graph_node(graph, i)) for i in range(lib.ggml_graph_n_nodes(graph))
        ]
        ends = cuts([seconds(lib, node) for node in nodes])
        view = _viewer(lib)
        self._views = [view(graph, a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)] if view else []
        self._graphs = [ctypes.addressof(view) for view in self._views] or [graph]

    def __iter__(self) -> Iterator[int]:
        return iter(self._graphs)


def cuts(times: Sequence[float]) -> list[int]:
    """Where pieces end, of nodes that take about so long: behind one that takes time, never behind one that
    takes none. A norm and the product of its weight, which ggml computes as one, thus stay together."""
    ends, since = [], 0.0
    for i, time in enumerate(times):
        since += time
        if time and since >= PIECE_S:
            ends.append(i + 1)
            since = 0.0
    if ends and not any(times[ends[-1] :]):
        ends.pop()  # what is behind the last is too little for a piece
    return [*ends, len(times)]


def seconds(lib: GgmlLibrary, node: GgmlTensor) -> float:
    """About how long a node takes, if it is a product or attention; the others take little."""
    name = ggml_api.op_name(lib, node)
    size: int = prod(node.ne)
    if name in ATTENTION:
        return size * ATTENTION_S
    if name not in PRODUCTS:
        return 0.0
    weight = ggml_api.tensor_at(node.src[0])
    # Of a mixture's experts no more are read than rows can have chosen.
    read = lib.ggml_nbytes(node.src[0]) * min(1.0, size / node.ne[0] / weight.ne[2])
    return float(max(size * weight.ne[0] / MULTIPLICATIONS, read / BYTES))


@cache
def _viewer(lib: GgmlLibrary) -> Viewer | None:
    """ggml's libraries have it to themselves, and a build may hide it."""
    view = getattr(ctypes.PyDLL(str(lib.folder / ggml_api.BASE_LIBRARY)), "ggml_graph_view", None)
    if view:
        view.restype, view.argtypes = View, (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    return view
