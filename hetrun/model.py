"""A model that runs: a source becomes a graph, a plan, weights in memory and something that takes steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from hetrun import registry
from hetrun.backend import Backend, Floats, WeightUse
from hetrun.errors import BudgetError, OptionError
from hetrun.executor import Between, Executor, Step
from hetrun.forecast import Forecast, path_of_machine
from hetrun.forms import coarse
from hetrun.graph import Graph, kv_shapes
from hetrun.kv import KvCache, sequence_bytes
from hetrun.kvrows import BLOCK
from hetrun.pilot import Pilot, Setup, planned, planner_for, recall_seats
from hetrun.plan import PlanSet
from hetrun.planner import Options, StaticPlanner, Wishes, this_machine
from hetrun.prefixes import CACHED
from hetrun.quant import QuantType, by_name
from hetrun.source import ModelSource, build_graph
from hetrun.stats import Stats
from hetrun.weights import Progress, WeightStore, available_memory, stretch
from hetrun.whole import WholeModel
from hetrun.whole_plan import backend_for
from hetrun.whole_plan import prepare as prepare_whole

MAX_SEQUENCES = 64
MARGIN = 0.15  # of the memory that is free, which hetrun leaves to others
LEAST_MEASURED = 8 << 20  # bytes of weights: measuring a smaller model takes longer than it could win
LOADING = 0.6  # of the progress of opening a model; the rest is measuring
KV_SHARE = 0.5  # of the memory that is free, for one sequence of full length, where the user said nothing
KV_OF_ALL = 0.25  # of the memory beside the weights, for all sequences, where one of full length takes less


class Model(Protocol):
    """What the engine knows of a model."""

    n_vocab: int
    context: int
    max_sequences: int  # that may run together
    stands_aside: bool  # whether steps of others can run in the middle of a long one
    stats: Stats

    @property
    def segment(self) -> str:
        """What runs now, in words; from any thread."""
        ...

    @property
    def plans(self) -> PlanSet:
        """The plans in force."""
        ...

    def step(self, step: Step, between: Between | None = None) -> Floats:
        """The logits of the wanted tokens; `between` may run steps of other sequences in the middle of it."""
        ...

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        """Seconds of a step of so many tokens of each sequence, each behind so many others; None: unknown."""
        ...

    def fits(self, chunks: Sequence[tuple[int, int]]) -> bool:
        """Whether there is memory for so many more tokens of each of these sequences."""
        ...

    def shareable(self, seq: int, n: int) -> int:
        """How many of a sequence's first n tokens a new one could begin with."""
        ...

    @property
    def native_seconds(self) -> float:
        """Time spent in calls that leave Python."""
        ...

    def alloc(self) -> int: ...
    def fork(self, seq: int, n: int | None = None) -> int: ...
    def truncate(self, seq: int, n: int) -> None: ...
    def free(self, seq: int) -> None: ...
    def length(self, seq: int) -> int: ...

    def cancel(self) -> None:
        """End the step that is running; from any thread."""
        ...

    def rearm(self) -> None:
        """Let the next step run."""
        ...

    def expect(self, tokens: int, between: Between | None = None) -> None:
        """So many tokens of prompts wait: prepare for them. Where that takes long, `between` is called."""
        ...

    def tend(self, idle: bool = False, between: Between | None = None) -> None:
        """Between two steps: look after the plan, with `between` in the same way."""
        ...

    def rest(self) -> None:
        """Nothing has come for a while: what only costs time to have again is given back."""
        ...

    def close(self) -> None: ...


class PlannedModel:
    """Graph, plan and executor."""

    max_sequences = MAX_SEQUENCES
    stands_aside = True

    def __init__(self, source: ModelSource, options: Options, progress: Progress | None = None) -> None:
        self.stats = Stats()
        with ExitStack() as undo:
            prepared = prepare(source, options)
            self.graph, self.context = prepared.graph, prepared.context
            self._backends = prepared.backends
            undo.callback(self._close_backends)
            self.n_vocab = self.graph.logits.width
            self._kv = KvCache(
                kv_shapes(self.graph),
                prepared.quant,
                self.context,
                # One more, so that somebody can look at something while all of them run.
                MAX_SEQUENCES + 1 + CACHED,
                prepared.plans.ubatch,
                prepared.kv_bytes,
            )
            self.max_sequences = max(1, min(MAX_SEQUENCES, self._kv.max_sequences - 1))
            store = WeightStore(self._backends)
            setup = _setup(prepared, options)
            store.load(prepared.wanted, stretch(progress, 0, LOADING if setup else 1))
            forecast = Forecast.load(setup.memory) if setup and setup.memory else Forecast()
            self._executor = Executor(
                self.graph,
                prepared.plans,
                self._backends,
                store,
                self._kv,
                self.stats,
                options.wishes.deterministic,
                forecast,
            )
            self.pilot: Pilot | None = None
            if setup:
                self.pilot = Pilot(
                    self.graph, self._backends, store, self._kv, self._executor, forecast, setup
                )
                self.pilot.begin(stretch(progress, LOADING, 1))
            self.alloc, self.fork, self.truncate = self._kv.alloc, self._kv.fork, self._kv.truncate
            self.free, self.length = self._kv.free, self._kv.length
            self.fits, self.shareable = self._kv.fits, self._kv.shareable
            undo.pop_all()

    @property
    def plans(self) -> PlanSet:
        """The plans in force."""
        return self._executor.plans

    def step(self, step: Step, between: Between | None = None) -> Floats:
        """The logits of the wanted tokens; good until the next step."""
        return self._executor.run(step, between)

    def expect(self, tokens: int, between: Between | None = None) -> None:
        """So many tokens of prompts wait: what is worth preparing for them is prepared now."""
        if self.pilot:
            self.pilot.expect(tokens, between)

    def tend(self, idle: bool = False, between: Between | None = None) -> None:
        """Between two steps: look after the plan."""
        if self.pilot:
            self.pilot.tend(idle, between)

    def rest(self) -> None:
        """Nothing has come for a while: memory of keys and values that nobody needs goes to the system."""
        self._kv.trim()

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        """Seconds of a step of so many tokens of each sequence, each behind so many others; None: unknown."""
        return self.pilot.predict(chunks) if self.pilot else None

    @property
    def native_seconds(self) -> float:
        """Time spent in calls that leave Python."""
        return self._executor.native_seconds

    @property
    def segment(self) -> str:
        """What runs now, in words; from any thread."""
        return self._executor.segment

    @property
    def kv_bytes(self) -> int:
        """Memory of keys and values in use."""
        return self._kv.used_bytes

    @property
    def kv(self) -> KvCache:
        """Keys and values of all sequences."""
        return self._kv

    @property
    def backends(self) -> Mapping[str, Backend]:
        """What it may run on, by name."""
        return self._backends

    def forget_threads(self) -> None:
        """Somebody else has set the backends' threads: they are set again before the next pass."""
        self._executor.forget_threads()

    def cancel(self) -> None:
        """End the step that is running; from any thread."""
        for backend in self._backends.values():
            backend.cancel()

    def rearm(self) -> None:
        """Let the next step run."""
        for backend in self._backends.values():
            backend.rearm()

    def close(self) -> None:
        """Give everything back, and keep what was learnt."""
        if self.pilot:
            self.pilot.save()
        self._executor.close()
        self._close_backends()

    def _close_backends(self) -> None:
        for backend in self._backends.values():
            backend.close()


def create_backends(options: Options) -> dict[str, Backend]:
    """The backends asked for, or all that work here, the most wanted first."""
    known = registry.backends()
    names = registry.choose(list(options.backends) if options.backends else None, options.precision)
    return {name: known[name].create() for name in names}


def plan_graph(
    graph: Graph, backends: Mapping[str, Backend], wishes: Wishes
) -> tuple[PlanSet, dict[str, list[WeightUse]]]:
    """The plan set, and which weights each backend must hold for it."""
    plans = StaticPlanner(backends, list(backends)).plan(graph, this_machine(), wishes)
    wanted: dict[str, dict[WeightUse, None]] = {name: {} for name in backends}
    for segment in dict.fromkeys(
        s for p in {id(p.stages): p for p in plans.plans.values()}.values() for s in p.segments
    ):
        wanted[segment.backend].update(dict.fromkeys(backends[segment.backend].wants(segment.ops)))
    return plans, {name: list(uses) for name, uses in wanted.items()}


def kv_quant(graph: Graph, name: str) -> QuantType:
    """The type of KV rows, which must divide the model's heads into whole blocks."""
    quant = by_name(name.upper())
    for shape in kv_shapes(graph).values():
        if shape.head_dim % quant.block:
            raise OptionError(
                f"--kv-type {name} needs heads of a multiple of {quant.block}, not {shape.head_dim}"
            )
    return quant


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
                f"this model needs at least {least / 2**20:.0f} MiB"
            )
    else:
        room = int(KV_SHARE * max(0, available_memory() - weights))
    if options.ctx is not None:
        _check_context(options.ctx, kv_bytes)
        return options.ctx
    return min(trained, max(BLOCK, _longest(trained, kv_bytes, room)))


def _longest(most: int, kv_bytes: KvBytes, room: int) -> int:
    """The longest sequence that fits."""
    return bisect_right(range(most + 1), room, key=kv_bytes) - 1


def _check_context(ctx: int, kv_bytes: KvBytes) -> None:
    """A context that memory cannot hold is refused now, and not in the middle of an answer."""
    needed, free = kv_bytes(ctx), available_memory()
    if needed > free:
        raise BudgetError(
            f"--ctx {ctx} needs {needed / 2**30:.1f} GiB for keys and values, "
            f"but {free / 2**30:.1f} GiB are free; up to {_longest(ctx, kv_bytes, free)} tokens would fit"
        )


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is decided about a model before its weights are read."""

    graph: Graph
    backends: dict[str, Backend]
    plans: PlanSet
    wanted: dict[str, list[WeightUse]]
    quant: QuantType
    context: int
    kv_bytes: int  # that all sequences together may take
    room: int  # bytes that weights may take, and what backends hold besides


def prepare(source: ModelSource, options: Options) -> Prepared:
    """Decide; the backends are the caller's to close."""
    graph = build_graph(source, options.ctx)
    quant = kv_quant(graph, options.kv_type)
    backends = create_backends(options)
    try:
        plans, wanted = plan_graph(graph, backends, options.wishes)
        weights = sum(backends[name].resident_bytes(uses) for name, uses in wanted.items())
        kv_bytes = partial(sequence_bytes, kv_shapes(graph), quant, plans.ubatch)
        context = choose_context(source, options, weights, kv_bytes)
        built_for = options.ctx or source.require_int("context_length", 1, 1 << 31)
        # Some models compute differently for sequences that stay shorter than they were built for.
        if context != built_for and (shorter := build_graph(source, context)) != graph:
            graph = shorter
            plans, wanted = plan_graph(graph, backends, options.wishes)
    except BaseException:
        for backend in backends.values():
            backend.close()
        raise
    free = options.ram if options.ram is not None else int(available_memory() * (1 - MARGIN))
    one = kv_bytes(context)
    of_all = kv_of_all(one, free - weights)
    bill = {"weights": weights, "KV of one full sequence": one, "KV of all, at most": of_all}
    room = max(weights, free - of_all)
    return Prepared(graph, backends, replace(plans, memory=bill), wanted, quant, context, of_all, room)


def kv_of_all(one: int, room: int) -> int:
    """Bytes that the keys and values of all sequences may take: one of full length fits in any case."""
    return max(one, min(MAX_SEQUENCES * one, int(KV_OF_ALL * max(0, room))))


def _setup(prepared: Prepared, options: Options) -> Setup | None:
    """What a pilot needs; None where nothing is to be decided while the model runs."""
    wishes = options.wishes
    if options.planner == "static" or wishes.plan or wishes.deterministic:
        return None
    if sum(w.nbytes for w in prepared.graph.weights().values()) < LEAST_MEASURED:
        return None
    known = registry.backends()
    plan = prepared.plans.plan(1)
    home = {coarse(op.scope): s.backend for s in plan.segments for op in s.ops}
    allowed = options.backends or ()
    chosen = [n for n in prepared.backends if known[n].preference or n in allowed or n in home.values()]
    machine = this_machine()
    details = {n: str(known[n].probe()) for n in chosen}
    return Setup(
        home,
        tuple(chosen),
        (wishes.threads,) if wishes.threads else machine.counts,
        prepared.room,
        prepared.context,
        options.eager,
        path_of_machine(machine.cores, details),
        options.precision,
        () if wishes.threads else machine.wide,
    )


def open_planned(source: ModelSource, options: Options, progress: Progress | None = None) -> Model:
    """A model that takes steps, its weights read."""
    if backend := backend_for(source, options.backends):
        return WholeModel(source, backend, options, progress)
    return PlannedModel(source, options, progress)


def describe(source: ModelSource, options: Options) -> PlanSet:
    """The plan for a model, without reading its weights."""
    if whole := backend_for(source, options.backends):
        return prepare_whole(source, whole, options).plans
    prepared = prepare(source, options)
    try:
        setup = _setup(prepared, options)
        if setup is None or setup.memory is None:
            return prepared.plans
        forecast = Forecast.load(setup.memory)
        recall_seats(forecast, setup)
        planner = planner_for(prepared.graph, prepared.backends, forecast, setup)
        return planned(planner, prepared.plans, setup)
    finally:
        for backend in prepared.backends.values():
            backend.close()
