"""How long sequences may become, and what their keys and values take."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from hetrun.errors import BudgetError, OptionError
from hetrun.graph import Graph, kv_shapes
from hetrun.graph.quant import QuantType, by_name
from hetrun.loader.source import ModelSource
from hetrun.memory.kv.paged_allocator import BLOCK
from hetrun.planner.options import Options
from hetrun.system.memory_info import available_memory, free_memory

KV_SHARE = 0.5  # of the memory that is free, for one sequence of full length, where the user said nothing

KvBytes = Callable[[int], int]  # of one sequence of so many tokens


def choose_context(source: ModelSource, options: Options, weights: int, kv_bytes: KvBytes) -> int:
    """Tokens per sequence: what was asked for, or what the model was trained for, or what memory holds."""
    trained = source.require_int("context_length", 1, 1 << 31)
    if options.ram is not None:
        room = options.ram - weights
        least = weights + kv_bytes(options.ctx or BLOCK)
        if least > options.ram:
            raise BudgetError(
                f"--ram {options.ram / 2**20:.0f} MiB is too little: "
                f"this model needs at least {-(-least >> 20)} MiB"
            )
    else:
        room = int(KV_SHARE * max(0, available_memory() - weights))
    if options.ctx is not None:
        _check_context(options.ctx, trained, kv_bytes)
        return options.ctx
    return min(trained, max(BLOCK, longest(trained, kv_bytes, room)))


def longest(most: int, kv_bytes: KvBytes, room: int) -> int:
    """The longest sequence that fits."""
    return bisect_right(range(most + 1), room, key=kv_bytes) - 1


def _check_context(ctx: int, trained: int, kv_bytes: KvBytes) -> None:
    """A context that memory cannot hold is refused now, and not in the middle of an answer."""
    needed, free = kv_bytes(ctx), available_memory()
    if needed > free:
        fitting = longest(ctx, kv_bytes, free)
        beyond = f", and the model was trained for {trained}" if fitting > trained else ""
        raise BudgetError(
            f"--ctx {ctx} needs {needed / 2**30:.1f} GiB for keys and values, "
            f"but {free / 2**30:.1f} GiB are free of {free_memory().of}; "
            f"up to {fitting} tokens would fit{beyond}"
        )


def kv_quant(graph: Graph, name: str) -> QuantType:
    """The type of KV rows, which must divide the model's heads into whole blocks."""
    quant = by_name(name.upper())
    for shape in kv_shapes(graph).values():
        if shape.head_dim % quant.block:
            raise OptionError(
                f"--kv-type {name} needs heads of a multiple of {quant.block}, not {shape.head_dim}"
            )
    return quant
