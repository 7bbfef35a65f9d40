"""What the parts of the autotuner that decide stand on."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun.executor.autotune.active_plan import ActivePlan
from hetrun.executor.autotune.backend_pool import BackendPool
from hetrun.executor.autotune.crowd_watch import CrowdWatch
from hetrun.executor.autotune.explorer import Explorer
from hetrun.executor.autotune.state import TuningState
from hetrun.executor.autotune.tuned_model import TunedModel
from hetrun.executor.autotune.weight_migration import Weights


@dataclass(frozen=True, slots=True)
class TuningParts:
    """The model, what is known of it, and the parts that hold weights and plans and try others."""

    model: TunedModel
    state: TuningState
    pool: BackendPool
    weights: Weights
    active_plan: ActivePlan
    crowd: CrowdWatch
    explorer: Explorer
