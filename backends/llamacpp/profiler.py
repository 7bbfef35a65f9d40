"""Where the time of a graph goes. ggml asks after each node whether to stop, on the engine's own thread and
before it waits for the other threads: in watched runs we answer, and look at the clock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from time import perf_counter

from hetrun.backend.op_profile import Activity, ActivityTimes
from hetrun.backends.llamacpp import ggml_api
from hetrun.backends.llamacpp.ggml_api import PRODUCT, SORTED, GgmlLibrary, op_name
from hetrun.system.native_library import Prototypes, load_library

# ggml does not run these: they only say how memory is looked at.
EMPTY = {"NONE", "RESHAPE", "TRANSPOSE", "VIEW", "PERMUTE"}
COMPUTE = 16  # the flag of nodes that are run
# What nodes are for where we write them; everything else is `other`.
OF_OP: Mapping[str, Activity] = {
    **dict.fromkeys(("MUL_MAT", "MUL_MAT_ID", "OUT_PROD"), "products"),
    **dict.fromkeys((PRODUCT, SORTED), "products"),
    # SET_ROWS writes keys and values; CUSTOM is attention by a kernel of our own.
    **dict.fromkeys(("FLASH_ATTN_EXT", "CUSTOM", "SET_ROWS"), "attention"),
    **dict.fromkeys(("RMS_NORM", "NORM", "MUL"), "norms"),  # MUL is only written for a norm's weight
}
ASKED = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
QSORT: Prototypes = {"qsort": (None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, COMPARE)}


class GraphWatch:
    """Notes when each node of a graph was done, and books the time between two of them to the later one."""

    def __init__(self, lib: GgmlLibrary, stop: Callable[[], bool], spent: ActivityTimes) -> None:
        self._spent = spent
        self._stop = stop
        self._calls: list[tuple[float, float]] = []  # when ggml asked, and when it got its answer
        self._callback = ASKED(self._asked)  # kept: ggml has only its address
        self._lib = lib
        self._question = question_seconds()

    @property
    def address(self) -> int:
        """The C function that ggml is to ask."""
        return ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    def _asked(self, _: int | None) -> bool:
        now = perf_counter()
        stop = self._stop()
        self._calls.append((now, perf_counter()))
        return stop

    def run(self, graph: int, compute: Callable[[], int]) -> int:
        """Compute a graph and book what its nodes took; returns ggml's status."""
        self._calls.clear()
        start = perf_counter()
        status = compute()
        end = perf_counter()
        book(self._spent, nodes_of(self._lib, graph), start, self._calls, end, self._question)
        self._spent.looking += perf_counter() - end
        return status


@cache
def question_seconds() -> float:
    """What it takes to get from C into Python and back, which no clock that is read in Python shows.

    The C library's sort asks as often as ggml does, and does next to nothing in between.
    """
    calls: list[tuple[float, float]] = []

    def asked(a: int | None, b: int | None) -> int:
        now = perf_counter()
        calls.append((now, perf_counter()))
        return 0

    sort, numbers = load_library(None, QSORT).qsort, ctypes.create_string_buffer(64)
    compare, found = COMPARE(asked), []
    for _ in range(5):
        calls.clear()
        start = perf_counter()
        sort(numbers, 64, 1, compare)
        total = perf_counter() - start
        found.append((total - sum(b - a for a, b in calls)) / len(calls))
    return max(0.0, min(found))


def book(
    spent: ActivityTimes,
    nodes: Sequence[str],
    start: float,
    calls: Sequence[tuple[float, float]],
    end: float,
    question: float = 0.0,
) -> None:
    """Give each node the time from the answer before it to the question behind it, waiting for other threads
    included, without what a question takes. What comes behind the last answer is the last node's: there the
    others are waited for.

    Of a run that was stopped, or whose nodes are not understood, nothing is booked.
    """
    names = next((n for n in (fused(nodes), list(nodes)) if len(n) == len(calls)), None)
    if not names:
        return
    before = start
    for name, (asked, answered) in zip(names, calls, strict=True):
        looking = min(question, asked - before)
        spent.add(OF_OP.get(name, "other"), asked - before - looking)
        spent.looking += answered - asked + looking
        before = answered
    spent.add(OF_OP.get(names[-1], "other"), end - before)


def fused(nodes: Sequence[str]) -> list[str]:
    """The nodes as ggml runs them: a norm with the product right behind it is one."""
    pairs = zip(["", *nodes], nodes, strict=False)
    return [name for before, name in pairs if (before, name) != ("RMS_NORM", "MUL")]


def nodes_of(lib: GgmlLibrary, graph: int) -> list[str]:
    """The names of the nodes that ggml runs, in order."""
    tensors = [
        ggml_api.tensor_at(lib.ggml_graph_node(graph, i)) for i in range(lib.ggml_graph_n_nodes(graph))
    ]
    names = ((op_name(lib, t), t.flags) for t in tensors)
    return [op for op, flags in names if op not in EMPTY and flags & COMPUTE]
