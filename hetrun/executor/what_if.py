"""What other options would mean for the model that runs: the plan that it would have, and nothing loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetrun.client.queries import KNOBS, PlanForecast
from hetrun.config import Settings
from hetrun.errors import OptionError
from hetrun.executor.interface import Model
from hetrun.executor.plan_prediction import predict_plans
from hetrun.executor.planned_model import PlannedModel
from hetrun.loader.source import ModelSource
from hetrun.memory import breakdown as bill
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.options import Options
from hetrun.planner.plan import PlanSet
from hetrun.planner.rates import TokenRates

BESIDES = (bill.INTERPRETER, bill.LIBRARIES, bill.HELPERS, bill.RESERVE)


def changed(settings: Settings, changes: Mapping[str, object]) -> Settings:
    """The settings, with some of them as the user wrote them."""
    if others := [name for name in changes if name not in KNOBS]:
        raise OptionError(f"{others[0]} cannot be tried; the options that can are {', '.join(KNOBS)}")
    typed = Settings.resolve(environ={}, **changes)
    return replace(settings, **{name: getattr(typed, name) for name in changes})


def foresee(model: Model, source: ModelSource, options: Options, kv_type: str) -> PlanForecast:
    """The model that runs, with keys and values of this type, knows its times; called by the engine's thread,
    which everything native is for."""
    # What this process has now is the model that runs, too.
    held = {name: n for name in BESIDES if (n := model.plans.memory.get(name))}
    plans = predict_plans(source, replace(options, besides=held or None), _known(model))
    rates, notes = plans.rates or TokenRates(), plans.notes
    if rates.answers is None:
        notes = ("speeds are unknown: nothing was measured for this", *notes)
    if options.kv_type != kv_type:
        notes = (f"speeds are those with {kv_type} keys and values, as long texts were measured", *notes)
    return PlanForecast(
        plans.context,
        rates.answers,
        rates.full,
        rates.prompts,
        dict(plans.memory),
        {name: dict(bill) for name, bill in plans.devices.items()},
        plans.weights.read_full if plans.weights else 0,
        rates.basis == "measured",
        plans.plan(1).threads,
        options.kv_type,
        notes,
    )


def promised(model: Model) -> PlanSet:
    """What runs where and why, and how fast that should be; called by the engine's thread."""
    return model.promised if isinstance(model, PlannedModel) else model.plans


def _known(model: Model) -> WorkTimes | None:
    return model.autotuner.forecast if isinstance(model, PlannedModel) and model.autotuner else None
