"""How long sequences may become, and what their keys and values take."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from hetrun.errors import BudgetError, OptionError
from hetrun.graph import Graph, Op, kept_by, kv_shapes, states_of
from hetrun.graph.quant import QuantType, by_name
from hetrun.loader.architectures import build_graph
from hetrun.loader.source import ModelSource
from hetrun.memory.kv.cache import promised_for, sequence_bytes
from hetrun.memory.kv.paged_allocator import BLOCK
from hetrun.planner.options import Options
from hetrun.planner.plan import PlanSet
from hetrun.planner.rates import SHORT
from hetrun.planner.static import LARGEST_UBATCH
from hetrun.system.memory_info import available_memory, free_memory
from hetrun.system.units import format_bytes, format_minimum

KV_SHARE = 0.5  # of the memory that is free, for one sequence of full length, where the user said nothing
# Tokens that have room before weights have, where --ctx is not given: most texts are shorter.
USUAL_CONTEXT = 4096
STEP = 1024  # longer contexts that memory bounds are multiples of it: what others take changes little then

KvBytes = Callable[[int], int]  # of one sequence, by its number of tokens


class TooLittle(BudgetError):
    """A budget that is `short` of what the shortest of texts needs."""

    def __init__(self, message: str, short: int) -> None:
        super().__init__(message)
        self.short = short


class Context(NamedTuple):
    """How long sequences may become, and by which rule."""

    tokens: int
    why: str


class ContextPlanner:
    """The context of a model, the memory that keys and values take, and the graph that is built for it."""

    def __init__(self, source: ModelSource, options: Options, graph: Graph, quant: QuantType) -> None:
        self.source, self.graph, self.quant = source, graph, quant
        self._options = options

    @property
    def usual(self) -> int:
        """Tokens that have room before weights have."""
        return usual(self.source, self._options)

    def choose(self, held: int, plans: PlanSet, whole: bool = True) -> Context:
        """The longest that memory has room for, beside what is `held`: see `choose_context`."""
        return choose_context(self.source, self._options, held, self.kv_bytes(plans), whole)

    def rebuild(self, tokens: int) -> bool:
        """Build the graph for this context: some models compute differently for sequences that stay shorter
        than they were built for. False where the graph is the same."""
        before = self.graph
        if tokens != (self._options.ctx or trained_for(self.source)):
            self.graph = build_graph(self.source, tokens, self._options.spatial)
        return self.graph != before

    def kv_bytes(self, plans: PlanSet) -> KvBytes:
        """What a sequence takes in all layers, by its length."""
        return self.sequence_bytes(self.graph.ops, plans.ubatch)

    def sequence_bytes(self, ops: Sequence[Op], ubatch: int) -> KvBytes:
        """What a sequence takes in the layers of some ops, by its length."""
        return partial(sequence_bytes, kept_by(ops), self.quant, ubatch, states=states_of(ops))

    def least_kv(self, plans: PlanSet) -> int:
        """What the shortest of texts takes."""
        return self.kv_bytes(plans)(self._options.ctx or BLOCK)

    def short_kv(self, plans: PlanSet, context: int) -> int:
        """What is promised to a short text."""
        tokens, shapes = min(SHORT, context), kept_by(self.graph.ops)
        return promised_for(shapes, self.quant, tokens, context, self.kv_bytes(plans))

    def usual_kv(self, plans: PlanSet) -> int:
        """What a text of the usual length takes."""
        return self.kv_bytes(plans)(self.usual)

    def row_bytes(self, ops: Sequence[Op]) -> int:
        """What a text of the usual length takes in the layers of some ops, with the largest passes."""
        return self.sequence_bytes(ops, self._options.wishes.ubatch or LARGEST_UBATCH)(self.usual)


def trained_for(source: ModelSource) -> int:
    """Tokens of the longest texts that the model has learnt from."""
    return source.require_int("context_length", 1, 1 << 31)


def usual(source: ModelSource, options: Options) -> int:
    """Tokens that have room before weights have."""
    return options.ctx or min(trained_for(source), USUAL_CONTEXT)


def choose_context(
    source: ModelSource, options: Options, held: int, kv_bytes: KvBytes, whole: bool = True
) -> Context:
    """What was asked for; or what the model was trained for, if there is memory for that beside all weights;
    else the usual number first, then weights, then more tokens.

    `held` is everything besides keys and values, with the `whole` of the weights or the least of them.
    """
    room = _room(options, held, kv_bytes)
    trained = trained_for(source)
    if options.ctx is not None:
        _check_context(options.ctx, trained, kv_bytes)
        longer = f"; the model was trained for {trained:,}" if options.ctx > trained else ""
        return Context(options.ctx, f"as asked for{longer}")
    most = trained if whole else usual(source, options)
    tokens = min(most, max(BLOCK, longest(most, kv_bytes, room)))
    if tokens == trained:
        return Context(tokens, "what the model was trained for")
    if tokens > USUAL_CONTEXT:
        tokens -= tokens % STEP
    if whole or tokens < most:
        return Context(tokens, f"what memory has room for; the model was trained for {trained:,}")
    return Context(
        tokens,
        "a longer context (--ctx) would leave less memory for weights; the model was trained for "
        f"{trained:,} tokens",
    )


def _room(options: Options, held: int, kv_bytes: KvBytes) -> int:
    """For the keys and values of one sequence."""
    if options.ram is None:
        return int(KV_SHARE * max(0, available_memory() - held))
    least = held + kv_bytes(options.ctx or BLOCK)
    if least > options.ram:
        given = format_bytes(options.ram)
        raise TooLittle(
            f"--ram {given} is too little: this model needs at least {format_minimum(least)}",
            least - options.ram,
        )
    return options.ram - held


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
            f"--ctx {ctx} needs {format_bytes(needed)} for keys and values, "
            f"but {format_bytes(free)} are free of {free_memory().of}; "
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
