"""A model put together piece by piece, as PlannedModel does it, on backends of a test's choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from hetrun.backend import (
    Backend,
    Buffer,
    Buffers,
    Done,
    Pass,
    PassShape,
    ReadInto,
    Runner,
    Segment,
    WeightUse,
)
from hetrun.executor.executor import Executor
from hetrun.executor.stats import Stats
from hetrun.executor.steps import Between, Chunk, Step
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import Graph, Op, kv_shapes, states_of
from hetrun.graph.ops import Attention
from hetrun.graph.quant import by_name
from hetrun.loader.architectures import build_graph
from hetrun.loader.open_model import open_model
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.plan import BUCKETS, Placement, PlanSet, make_plans
from tests.models import tiny
from tests.models.tiny import TinyLlama
from tests.support.devicethread import DeviceThread, Task
from tests.support.folders import files_folder

if TYPE_CHECKING:
    from tests.models.hf import Row

Case: TypeAlias = "TinyLlama | Row"
Placed = Mapping[str, str]  # scope -> backend; "" is everything else


@cache
def model_file(case: Case) -> Path:
    """The tiny model's file, or its folder; written once for all tests."""
    if isinstance(case, TinyLlama):
        return tiny.write_gguf(case, files_folder() / f"{case}.gguf")
    from tests.models import hf  # torch

    return hf.folder(case)


@cache
def graph_of(case: Case, context: int | None = None) -> Graph:
    """The tiny model's forward step."""
    return build_graph(open_model(model_file(case)), context)


def windowed(graph: Graph, windows: Sequence[int]) -> Graph:
    """The same step, each layer's attention with a window."""
    ops = []
    for op in graph.ops:
        if isinstance(op.attrs, Attention):
            op = replace(op, attrs=replace(op.attrs, window=windows[op.attrs.layer]))
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def placements(placed: Placed) -> tuple[Placement, ...]:
    """From the coarsest scope to the finest, so that the finer ones count."""
    return tuple(Placement(scope, placed[scope], "the test says so") for scope in sorted(placed, key=len))


def plan_set(graph: Graph, placed: Placed, ubatch: int = 512, alone: Sequence[str] = ()) -> PlanSet:
    """The same placements in every bucket."""
    return PlanSet(
        make_plans(graph, dict.fromkeys(BUCKETS, (1, placements(placed))), alone), ubatch, "a test"
    )


@dataclass(slots=True)
class Rig:
    """What runs steps, and its parts."""

    executor: Executor
    kv: KvCache
    stats: Stats
    backends: Mapping[str, Backend]
    graph: Graph

    def logits(self, seq: int, tokens: Sequence[int]) -> np.ndarray:
        """All logits of a sequence's next tokens."""
        return self.step((seq, tokens, range(len(tokens))))

    def step(
        self, *chunks: tuple[int, Sequence[int], Sequence[int]], between: Between | None = None
    ) -> np.ndarray:
        """Run (sequence, tokens, wanted ones) together; a copy of the logits."""
        return self.executor.run(step(*chunks), between).copy()

    def close(self) -> None:
        self.executor.close()
        for backend in self.backends.values():
            backend.close()


def step(*chunks: tuple[int, Sequence[int], Sequence[int]]) -> Step:
    """A step of (sequence, tokens, wanted ones)."""
    return Step(tuple(Chunk(s, np.array(t, np.int64), np.array(w, np.int64)) for s, t, w in chunks))


def rig(
    case: Case,
    backends: Mapping[str, Backend],
    placed: Placed | None = None,
    *,
    plans: PlanSet | None = None,
    ubatch: int = 512,
    kv_type: str = "F32",
    context: int = 256,
    sequences: int = 8,
    deterministic: bool = False,
    windows: Sequence[int] = (),
    forecast: WorkTimes | None = None,
) -> Rig:
    """A tiny model on some backends; everything on the first one if nothing is said."""
    graph = windowed(graph_of(case), windows) if windows else graph_of(case)
    return rig_of(
        graph,
        backends,
        placed,
        plans=plans,
        ubatch=ubatch,
        kv_type=kv_type,
        context=context,
        sequences=sequences,
        deterministic=deterministic,
        forecast=forecast,
    )


def rig_of(
    graph: Graph,
    backends: Mapping[str, Backend],
    placed: Placed | None = None,
    *,
    plans: PlanSet | None = None,
    ubatch: int = 512,
    kv_type: str = "F32",
    context: int = 256,
    sequences: int = 8,
    deterministic: bool = False,
    forecast: WorkTimes | None = None,
) -> Rig:
    """The same of any graph."""
    alone = [name for name, backend in backends.items() if backend.asynchronous]
    plans = plans or plan_set(graph, placed or {"": next(iter(backends))}, ubatch, alone)
    wanted: dict[str, dict[WeightUse, None]] = {name: {} for name in backends}
    for segment in (s for plan in plans.plans.values() for s in plan.segments):
        wanted[segment.backend].update(dict.fromkeys(backends[segment.backend].wants(segment.ops)))
    store = WeightStore(backends)
    store.load(wanted)
    states = states_of(graph.ops)
    kv = KvCache(kv_shapes(graph), by_name(kv_type), context, sequences, plans.ubatch, states=states)
    stats = Stats()
    executor = Executor(graph, plans, backends, store, kv, stats, deterministic, forecast)
    return Rig(executor, kv, stats, backends, graph)


# --- a device that works by itself


class ThreadedDevice(Backend):
    """Another backend on a thread of its own, as a GPU would be: `submit` returns at once."""

    asynchronous = True

    def __init__(self, inner: Backend, before: Callable[[Segment], object] = lambda segment: None) -> None:
        """`before` is called on the device's thread before each segment."""
        self.name = inner.name
        self._inner = inner
        self._before = before
        self.given: list[Task] = []
        self._thread = DeviceThread(inner.name)

    def give(self, work: Callable[[], object]) -> Task:
        task = Task(work)
        self.given.append(task)
        self._thread.give(task)
        return task

    def supports(self, op: Op) -> bool:
        return self._inner.supports(op)

    def wants(self, ops: Sequence[Op]) -> tuple[WeightUse, ...]:
        return self._inner.wants(ops)

    def upload(self, wanted: WeightUse, read: ReadInto) -> Buffer:
        return self._inner.upload(wanted, read)

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        return ThreadedRunner(self, segment, self._inner.compile(segment, shape, buffers, kv))

    def before(self, segment: Segment) -> None:
        self._before(segment)

    def cancel(self) -> None:
        self._inner.cancel()

    def rearm(self) -> None:
        self._inner.rearm()

    def close(self) -> None:
        self._thread.close()
        self._inner.close()


class ThreadedRunner:
    """A runner on the device's thread."""

    def __init__(self, device: ThreadedDevice, segment: Segment, inner: Runner) -> None:
        self._device = device
        self._segment = segment
        self._inner = inner

    def submit(self, work: Pass) -> Done:
        elsewhere = replace(work, between=None)  # the engine's other passes stay on its own thread
        return self._device.give(lambda: self._run(elsewhere))

    def _run(self, work: Pass) -> None:
        self._device.before(self._segment)
        self._inner.submit(work).wait()

    def close(self) -> None:
        self._inner.close()
