"""A model that runs: a file becomes a graph, a plan, weights in memory and something that takes steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from hetrun import registry
from hetrun.backend import Backend, Floats, WeightUse
from hetrun.errors import BudgetError, ModelFileError, OptionError
from hetrun.executor import Executor, Step
from hetrun.formats.gguf import GGUFFile, TensorInfo, read_gguf
from hetrun.graph import Architecture, Extent, Graph, GraphBuilder, Weight, kv_shapes
from hetrun.kv import BLOCK, KvCache
from hetrun.plan import PlanSet
from hetrun.planner import StaticPlanner, Wishes, this_machine
from hetrun.quant import QuantType, by_name
from hetrun.stats import Stats
from hetrun.weights import Progress, WeightStore, available_memory

MAX_SEQUENCES = 16
KV_SHARE = 0.5  # of the memory that is free, for one sequence of full length, where the user said nothing


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A GGUF file as a source of weights and settings."""

    file: GGUFFile
    architecture: str

    @property
    def path(self) -> str:
        """The file."""
        return self.file.path

    def find(self, name: str) -> Weight | None:
        """A tensor as a matrix."""
        info = self.file.tensors.get(name)
        return None if info is None else _weight(self.path, info)

    def require_int(self, key: str, lo: int, hi: int) -> int:
        """A setting of the architecture."""
        if key == "vocab_size" and (table := self.find("token_embd.weight")):
            return table.shape[0]
        return self.file.require_int(self._key(key), lo, hi)

    def get_int(self, key: str, default: int, lo: int, hi: int) -> int:
        """A setting of the architecture, or its default."""
        return self.file.get_int(self._key(key), default, lo, hi)

    def get_float(self, key: str, default: float) -> float:
        """A setting of the architecture, or its default."""
        return self.file.get_float(self._key(key), default)

    def get_str(self, key: str, default: str) -> str:
        """A setting of the architecture, or its default."""
        return self.file.get_str(self._key(key), default)

    def _key(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        total = 0
        for t in self.file.tensors.values():
            n = 1
            for d in t.shape:
                n *= d
            total += n
        return total


def _weight(path: str, info: TensorInfo) -> Weight:
    if not isinstance(info.quant, QuantType):
        raise ModelFileError(
            path,
            f"the tensor {info.name} is {info.quant}, which hetrun cannot read yet; use another quantisation",
        )
    if len(info.shape) > 2:
        raise ModelFileError(path, f"the tensor {info.name} has {len(info.shape)} dimensions, not 1 or 2")
    rows, cols = (1, info.shape[0]) if len(info.shape) == 1 else info.shape
    row_bytes = info.quant.row_bytes(cols)
    return Weight(
        info.name, (rows, cols), info.quant, (Extent(path, info.offset, rows, row_bytes, row_bytes),)
    )


def open_model(path: Path) -> ModelFile:
    """Read a model file's header."""
    file = read_gguf(path)
    return ModelFile(file, file.require_str("general.architecture"))


def build_graph(source: ModelFile) -> Graph:
    """The forward step of a model file."""
    return _architecture(source).build(GraphBuilder(source), source)


def _architecture(source: ModelFile) -> Architecture:
    """A plugin's architecture, or the file of that name in `models/`."""
    found = registry.named("models", source.architecture)
    if found is not None:
        return cast(Architecture, found)
    # The name comes from the file: it must not become a path.
    module = f"hetrun.models.{source.architecture}"
    known = re.fullmatch(r"[a-z][a-z0-9]*", source.architecture) and source.architecture != "blocks"
    if not known or find_spec(module) is None:
        raise ModelFileError(
            source.path, f"its architecture {source.architecture[:40]!r} is not one that hetrun runs yet"
        )
    return cast(Architecture, import_module(module))


@dataclass(frozen=True, slots=True)
class Options:
    """How a model is to be run; None is for hetrun to choose."""

    wishes: Wishes
    backends: tuple[str, ...] | None = None
    ctx: int | None = None
    kv_type: str = "f16"
    ram: int | None = None


class Model(Protocol):
    """What the engine knows of a model."""

    n_vocab: int
    context: int
    plans: PlanSet
    stats: Stats

    def step(self, step: Step) -> Floats:
        """The logits of the wanted tokens."""
        ...

    @property
    def native_seconds(self) -> float:
        """Time spent in calls that leave Python."""
        ...

    def alloc(self) -> int: ...
    def fork(self, seq: int) -> int: ...
    def truncate(self, seq: int, n: int) -> None: ...
    def free(self, seq: int) -> None: ...
    def length(self, seq: int) -> int: ...

    def cancel(self) -> None:
        """End the step that is running; from any thread."""
        ...

    def rearm(self) -> None:
        """Let the next step run."""
        ...

    def close(self) -> None: ...


class PlannedModel:
    """Graph, plan and executor."""

    def __init__(self, source: ModelFile, options: Options, progress: Progress | None = None) -> None:
        self.stats = Stats()
        with ExitStack() as undo:
            prepared = prepare(source, options)
            self.graph, self.plans, self.context = prepared.graph, prepared.plans, prepared.context
            self._backends = prepared.backends
            undo.callback(self._close_backends)
            self.n_vocab = self.graph.logits.width
            self._kv = KvCache(
                kv_shapes(self.graph),
                prepared.quant,
                self.context,
                MAX_SEQUENCES,
                options.wishes.deterministic,
            )
            store = WeightStore(self._backends)
            store.load(prepared.wanted, progress)
            self._executor = Executor(
                self.graph,
                self.plans,
                self._backends,
                store,
                self._kv,
                self.stats,
                options.wishes.deterministic,
            )
            self.alloc, self.fork, self.truncate = self._kv.alloc, self._kv.fork, self._kv.truncate
            self.free, self.length = self._kv.free, self._kv.length
            undo.pop_all()

    def step(self, step: Step) -> Floats:
        """The logits of the wanted tokens; good until the next step."""
        return self._executor.run(step)

    @property
    def native_seconds(self) -> float:
        """Time spent in calls that leave Python."""
        return self._executor.native_seconds

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV blocks in use."""
        return self._kv.used_bytes

    def cancel(self) -> None:
        """End the step that is running; from any thread."""
        for backend in self._backends.values():
            backend.cancel()

    def rearm(self) -> None:
        """Let the next step run."""
        for backend in self._backends.values():
            backend.rearm()

    def close(self) -> None:
        """Give everything back."""
        self._executor.close()
        self._close_backends()

    def _close_backends(self) -> None:
        for backend in self._backends.values():
            backend.close()


def create_backends(options: Options) -> dict[str, Backend]:
    """The backends asked for, or all that work here, the most wanted first."""
    known = registry.backends()
    names = registry.choose(list(options.backends) if options.backends else None)
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
    for _, head_dim in kv_shapes(graph).values():
        if head_dim % quant.block:
            raise OptionError(f"--kv-type {name} needs heads of a multiple of {quant.block}, not {head_dim}")
    return quant


def choose_context(source: ModelFile, options: Options, weights: int, per_token: int) -> int:
    """Tokens per sequence: what was asked for, or what the model was trained for, or what memory holds."""
    trained = source.require_int("context_length", 1, 1 << 31)
    if options.ram is not None:
        room = options.ram - weights
        least = weights + per_token * (options.ctx or BLOCK)
        if least > options.ram:
            raise BudgetError(
                f"--ram {options.ram / 2**20:.0f} MiB is too little: "
                f"this model needs at least {least / 2**20:.0f} MiB"
            )
    else:
        room = int(KV_SHARE * max(0, available_memory() - weights))
    if options.ctx is not None:
        _check_context(options.ctx, per_token)
        return options.ctx
    return max(BLOCK, min(trained, room // per_token))


def _check_context(ctx: int, per_token: int) -> None:
    """A context that memory cannot hold is refused now, and not in the middle of an answer."""
    needed, free = ctx * per_token, available_memory()
    if needed > free:
        raise BudgetError(
            f"--ctx {ctx} needs {needed / 2**30:.1f} GiB for keys and values, "
            f"but {free / 2**30:.1f} GiB are free; up to {free // per_token} tokens would fit"
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


def prepare(source: ModelFile, options: Options) -> Prepared:
    """Decide; the backends are the caller's to close."""
    graph = build_graph(source)
    quant = kv_quant(graph, options.kv_type)
    per_token = sum(2 * quant.row_bytes(heads * dim) for heads, dim in kv_shapes(graph).values())
    backends = create_backends(options)
    try:
        plans, wanted = plan_graph(graph, backends, options.wishes)
        weights = sum(backends[name].resident_bytes(uses) for name, uses in wanted.items())
        context = choose_context(source, options, weights, per_token)
    except BaseException:
        for backend in backends.values():
            backend.close()
        raise
    bill = {"weights": weights, "KV of one full sequence": per_token * context}
    return Prepared(graph, backends, replace(plans, memory=bill), wanted, quant, context)


def describe(path: Path, options: Options) -> PlanSet:
    """The plan for a file, without reading its weights."""
    prepared = prepare(open_model(path), options)
    for backend in prepared.backends.values():
        backend.close()
    return prepared.plans
