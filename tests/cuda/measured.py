"""A model on a machine with a GPU: how long passes take, what was predicted, what lies where."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from hetrun.api.local_model import LocalModel
from hetrun.backend import registry
from hetrun.backends.cuda.backend import CudaBackend
from hetrun.backends.cuda.memory import CudaMemory
from hetrun.client.events import DeviceSlots
from hetrun.engine.loaded_model import LoadedModel
from hetrun.executor.planned_model import PlannedModel
from hetrun.loader.architectures import build_graph
from hetrun.loader.open_model import open_model
from hetrun.planner.plan import BUCKETS, PlanSet
from hetrun.tools.bench.cases import BenchCase
from hetrun.tools.bench.hetrun_side import HetrunSide
from hetrun.tools.bench.interleave import measure
from tests.cuda.best import best_seconds

CUDA = "cuda"
MOVED = 256 << 20  # bytes of a copy that is timed
SPARE = 64 << 20
SHAPE = {"decode": 1, "prefill": 4096}  # tokens by whose plan a pass of a case runs


@dataclass(frozen=True, slots=True)
class Measured:
    """One case on one set of backends."""

    tok_s: tuple[float, ...]
    predicted: float | None  # seconds of a step
    best: float | None  # the same of the best placement that there is, by what was measured of the parts
    places: Mapping[str, int]  # bytes of weights that a pass reads, by backend
    held: int  # the most bytes of the device's memory
    limit: int  # that were granted
    slots: DeviceSlots | None  # for experts of the host
    units: Mapping[str, float]  # bytes per second at which the device reads each form of unit

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of a step."""
        return tuple(1 / each for each in self.tok_s)


def measured(path: Path, case: BenchCase, rounds: int, **options: object) -> Measured:
    """Run a case so often on a model that is opened for it."""
    with LocalModel(path, eager=True, spec="off", ctx=case.context + 64, **options) as llm:  # type: ignore[arg-type]
        duel = measure(case, rounds, HetrunSide(llm), None, lambda what, over: None)
        found: Measured = llm.call(partial(_looked, case=case, tok_s=duel.ours))
        return found


def _looked(loaded: LoadedModel, case: BenchCase, tok_s: tuple[float, ...]) -> Measured:
    model = loaded.model
    assert isinstance(model, PlannedModel)
    backend = model.backends.get(CUDA)
    gpu = backend.gpu if isinstance(backend, CudaBackend) and backend.gpu.started else None
    granted = backend.granted if backend else None
    plans, tokens = model.plans, SHAPE[case.kind]
    return Measured(
        tok_s,
        model.predict([(1, float(case.depth + case.tokens // 2))]) if case.kind == "decode" else None,
        best_seconds(model, case.depth) if model.autotuner and case.kind == "decode" else None,
        _places(plans, min(tokens, plans.ubatch)),
        gpu.memory.driver.held_memory() if gpu else 0,
        granted.limit if granted else 0,
        model.device_slots(),
        _rates(model, case) if gpu and case.kind == "decode" else {},
    )


def _places(plans: PlanSet, tokens: int) -> dict[str, int]:
    found: dict[str, dict[str, int]] = {}
    for s in plans.plan(tokens).segments:
        mine = found.setdefault(s.backend, {})
        mine |= {w.name: w.nbytes for op in s.ops if op.kind != "embed" for w in op.weights}
    return {name: sum(weights.values()) for name, weights in found.items()}


def _rates(model: PlannedModel, case: BenchCase) -> dict[str, float]:
    """How fast the device reads the weights of each form of unit, as the planner knows it."""
    if not model.autotuner:
        return {}
    planner, found = model.autotuner.planner, dict[str, float]()
    for i, unit in enumerate(planner.units):
        seconds = planner.costs.seconds(i, CUDA, model.plans.plan(1).threads, 1, max(1.0, case.depth))
        nbytes = sum(w.nbytes for op in unit.ops if op.kind != "embed" for w in op.weights)
        if seconds and nbytes and unit.form not in found:
            found[unit.form] = nbytes / seconds
    return found


# --- plans that people could write by hand


def layers_of(path: Path) -> int:
    """How many it has."""
    return 1 + max(int(s.split(".")[1]) for s in _scopes(path) if s.startswith("blk."))


def layer_split(path: Path, file: Path, layers: int) -> Path:
    """The last layers and the output matrix on the GPU, the others on the host."""
    n = layers_of(path)
    there = [f"blk.{i}" for i in range(n - layers, n)] + ["output"]
    return saved(file, [("", "llamacpp"), *((scope, CUDA) for scope in there)])


def all_streamed(path: Path, file: Path) -> Path:
    """Every layer on the GPU, with weights that cross for each pass; the output matrix stays there."""
    n = layers_of(path)
    layers = [(f"blk.{i}", f"{CUDA}-streamed") for i in range(n)]
    return saved(file, [("", "llamacpp"), *layers, ("output", CUDA)])


def _scopes(path: Path) -> Sequence[str]:
    return [op.scope for op in build_graph(open_model(path)).ops]


def saved(file: Path, placed: Sequence[tuple[str, str]]) -> Path:
    """A plan as `hetrun plan --json` writes it, the same for passes of every size."""
    placements = [{"scope": scope, "backend": name, "why": "by hand"} for scope, name in placed]
    plans = [{"bucket": bucket, "threads": _cores(), "placements": placements} for bucket in BUCKETS]
    file.write_text(json.dumps({"format": 1, "ubatch": 512, "plans": plans}), encoding="utf-8")
    return file


def _cores() -> int:
    from hetrun.planner.options import this_machine

    return this_machine().cores


# --- what the machine gives


@contextmanager
def gpu_memory(nbytes: int) -> Iterator[CudaMemory]:
    """The GPU by itself, with so much memory and what it needs besides."""
    backend = registry.backends()[CUDA].create()
    assert isinstance(backend, CudaBackend)
    try:
        backend.grant(backend.gpu.least + nbytes + SPARE)
        backend.start()
        yield backend.gpu.memory
    finally:
        backend.close()


def copied(memory: CudaMemory, source: int, target: int, nbytes: int, times: int = 8) -> float:
    """Bytes per second of a copy: the median of some."""
    driver, rates = memory.driver, list[float]()
    done = driver.event()
    for _ in range(times + 1):
        start = perf_counter()
        driver.copy(target, source, nbytes, memory.bringing)
        driver.record(done, memory.bringing)
        driver.synchronize(done)
        rates.append(nbytes / (perf_counter() - start))
    driver.drop(done)
    return median(rates[1:])


def link_and_memory(nbytes: int | None = None) -> tuple[float, float]:
    """Bytes per second over the link, and of the GPU's memory (read, and written as well)."""
    size = nbytes or MOVED
    with gpu_memory(2 * size) as memory:
        one, other = (memory.take(size, "a copy") for _ in range(2))
        host = memory.driver.pinned(size)
        host[:] = np.arange(size, dtype=np.uint8)
        link = copied(memory, int(host.ctypes.data), one, size)
        return link, 2 * copied(memory, one, other, size)
