"""What a model takes in memory besides weights, before there is any of it."""

from __future__ import annotations

from collections.abc import Sequence

from hetrun.backend import FLOAT_BYTES
from hetrun.backend.weight_streaming import Mixture
from hetrun.graph import Graph
from hetrun.memory import breakdown
from hetrun.memory.ledger import RESERVE, kernel_figures
from hetrun.planner.plan import crossing_width

MAX_SEQUENCES = 64
LIBRARIES = 24 << 20  # of a process that has neither vocabulary nor native library yet: both of them
SOON = 2 << 20  # of one that has them: what else is loaded with the model
# What a process takes that has a model open, before its weights, and what each token and merge of its
# vocabulary adds: that of `hetrun plan` has opened none, and must plan for the same. One that takes more, as
# for torch, plans with what it takes.
PROCESS, ENTRY = 65 << 20, 206
HELPER = 15 << 20  # of the process that writes chat templates, once there is one
WORK = 14 << 20  # of compiled graphs of few tokens, and scratch
KV_OF_ALL = 0.25  # of the memory beside the weights, for all sequences, where one of full length takes less


def besides(entries: int, to_come: int = LIBRARIES) -> int:
    """Memory that is held besides weights, keys and values: the interpreter and its libraries, of which so
    much is still to come, and a vocabulary of `entries` tokens and merges."""
    return RESERVE + max(PROCESS + ENTRY * entries, kernel_figures().total + to_come)


def in_parts(held: int, front: int = 0) -> dict[str, int]:
    """What is held besides, as a bill has it. `front`: what the process takes that started this one."""
    libraries = min(held - RESERVE, max(LIBRARIES, kernel_figures().file_backed))
    parts = {breakdown.INTERPRETER: held - RESERVE - libraries, breakdown.LIBRARIES: libraries}
    parts = {name: size for name, size in parts.items() if size}
    return parts | {breakdown.HELPERS: HELPER + front, breakdown.RESERVE: RESERVE}


def work_bytes(graph: Graph, tokens: int) -> int:
    """About what passes of this many tokens work in: their widest value, some of the usual width, and the
    widest one rounded to 8 bits with its scales."""
    widths = [op.out.width for op in graph.ops if op.kind != "head"]
    usual = next(op.out.width for op in graph.ops if op.kind == "embed")
    return WORK + tokens * (FLOAT_BYTES * (max(widths) + 3 * usual) + 3 * max(widths) // 2)


def crossing_bytes(graph: Graph, tokens: int) -> int:
    """What passes of this many tokens work in on the host, where devices compute."""
    return WORK + tokens * FLOAT_BYTES * crossing_width(graph)


def mixture_bytes(mixtures: Sequence[Mixture], tokens: int) -> int:
    """What passes of this many tokens work in besides, for experts that come when they are wanted: what each
    choice of a token gives, and what comes before its last product."""
    return max(
        tokens * m.used * FLOAT_BYTES * sum(m.weights[i].shape[0] // m.experts for i in (0, 2))
        for m in mixtures
    )


def kv_of_all(one: int, room: int) -> int:
    """Bytes that the keys and values of all sequences may take: one of full length fits in any case."""
    return max(one, min(MAX_SEQUENCES * one, int(KV_OF_ALL * max(0, room))))
