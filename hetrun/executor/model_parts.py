"""The parts of a loaded model that its step runner and its recovery share."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun.executor.executor import Executor
from hetrun.executor.model_tuning import ModelTuning
from hetrun.executor.model_weights import ModelWeights
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.ledger import Books


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What runs passes, what they read and write, and what tunes them."""

    executor: Executor
    kv: KvCache
    books: Books
    weights: ModelWeights
    tuning: ModelTuning
