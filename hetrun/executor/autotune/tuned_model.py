"""The model whose plan is kept good, as the parts of the autotuner need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetrun.backend import Backend
from hetrun.executor.autotune.setup import Setup
from hetrun.executor.executor import Executor
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import Graph
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.online import OnlinePlanner


@dataclass(frozen=True, slots=True)
class TunedModel:
    """What runs the model, what holds it, and what plans it."""

    graph: Graph
    backends: Mapping[str, Backend]
    store: WeightStore
    kv: KvCache
    executor: Executor
    forecast: WorkTimes
    setup: Setup
    planner: OnlinePlanner
