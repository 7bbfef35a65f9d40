"""The plan for a model and its speeds, without reading its weights."""

from __future__ import annotations

from dataclasses import replace

from hetrun.executor.autotune.answer_pace import pace_of
from hetrun.executor.autotune.measurement.core_choice import recall_seats
from hetrun.executor.autotune.setup import planned, planner_for
from hetrun.executor.library.plan import backend_for, prepare as prepare_whole
from hetrun.executor.loading.load_plan import prepare
from hetrun.executor.tuning_setup import setup_of
from hetrun.loader.source import ModelSource
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.expert_stats import known_choices
from hetrun.planner.online import OnlinePlanner
from hetrun.planner.options import Options
from hetrun.planner.plan import PlanSet
from hetrun.planner.rates import SHORT, TokenRates


def predict_plans(source: ModelSource, options: Options, known: WorkTimes | None = None) -> PlanSet:
    """The plan for a model and what it promises, without reading its weights; by times that are known, or
    else those that were kept."""
    if whole := backend_for(source, options.backends):
        return prepare_whole(source, whole, options).plans
    prepared = prepare(source, options)
    try:
        setup = setup_of(prepared, options)
        if setup is None or setup.memory is None:
            return prepared.plans
        forecast = known or WorkTimes.load(setup.memory)
        if known is None:
            recall_seats(forecast, setup)  # what runs has taken its seats
        planner = planner_for(prepared.graph, prepared.backends, forecast, setup)
        planner.listen(known_choices(prepared.graph).likely)
        plans = planned(planner, prepared.plans, setup)
        return replace(
            plans, rates=token_rates(planner, plans, pace_of(forecast, prepared.graph, plans.plan(1).threads))
        )
    finally:
        for backend in prepared.backends.values():
            backend.close()


def token_rates(planner: OnlinePlanner, plans: PlanSet, pace: float) -> TokenRates:
    """What tokens of an answer take, with what comes between them, and passes of a long prompt."""
    one, many, most = plans.plan(1), plans.plan(plans.ubatch), min(plans.ubatch, plans.context)
    short = planner.pass_seconds(one, 1, min(SHORT, plans.context))
    full = planner.pass_seconds(one, 1, plans.context)
    prompt = planner.pass_seconds(many, most, most / 2)
    if short is None:
        return TokenRates()
    prompts, answers = most / prompt if prompt else None, 1 / (pace * short)
    return TokenRates(prompts, answers, 1 / (pace * full) if full else None, "measured")
