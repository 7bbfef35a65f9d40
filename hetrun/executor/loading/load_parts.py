"""What planners of a model's weights are made of, and what each of them gives back."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun.executor.loading.context_length import Context, ContextPlanner
from hetrun.executor.loading.load_budget import LoadBudget
from hetrun.executor.loading.placement_planner import PlacementPlanner, Wanted
from hetrun.executor.loading.prompt_device import PromptDevice, PromptDevices
from hetrun.planner.options import Options
from hetrun.planner.plan import PlanSet
from hetrun.prefetch.cached_experts import ExpertPart
from hetrun.prefetch.mapped_weights import MappedPart
from hetrun.prefetch.streamed_weights import StreamingPlan


@dataclass(frozen=True, slots=True)
class LoadParts:
    """What planners of all ways to hold weights share."""

    options: Options
    contexts: ContextPlanner
    placement: PlacementPlanner
    budget: LoadBudget
    prompts: PromptDevices


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """One way to hold a model's weights, and what that leaves for texts."""

    plans: PlanSet
    wanted: Wanted
    context: Context
    weights: int  # bytes of those that are read when the model is opened, as a whole
    kv_bytes: int  # that all sequences together may take
    room: int = 0  # bytes that weights may take, and what backends hold besides; 0: nothing beyond these
    streamed: StreamingPlan | None = None
    mapped: MappedPart | None = None
    experts: ExpertPart | None = None
    prompts: PromptDevice | None = None  # what runs prompts, where weights come from disk
