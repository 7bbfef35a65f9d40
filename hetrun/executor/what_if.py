"""What other options would mean for the model that runs: the plan that it would have, and nothing loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetrun.client.queries import KNOBS, Foreseen
from hetrun.config import Settings
from hetrun.errors import OptionError
from hetrun.executor.interface import Model
from hetrun.executor.planned_model import PlannedModel, foreseen
from hetrun.loader.source import ModelSource
from hetrun.memory import breakdown as bill
from hetrun.planner.costmodel import Forecast
from hetrun.planner.options import Options
from hetrun.planner.plan import BUCKETS, PlanSet

BESIDES = (bill.INTERPRETER, bill.LIBRARIES, bill.RESERVE)


def changed(settings: Settings, changes: Mapping[str, object]) -> Settings:
    """The settings with some of them as somebody wrote them."""
    if others := [name for name in changes if name not in KNOBS]:
        raise OptionError(f"{others[0]} is not among what can be tried: {', '.join(KNOBS)}")
    typed = Settings.resolve(environ={}, **changes)
    return replace(settings, **{name: getattr(typed, name) for name in changes})


def foresee(model: Model, source: ModelSource, options: Options, kv_type: str) -> Foreseen:
    """The model that runs, with keys and values of this type, knows its times; called by the engine's thread,
    which everything native is for."""
    # What this process has now is the model that runs, too.
    held = {name: n for name in BESIDES if (n := model.plans.memory.get(name))}
    plans, context, one_s, full_s = foreseen(source, replace(options, besides=held or None), _known(model))
    one, many = (1 / one_s if one_s else _rate(plans, BUCKETS[0])), _rate(plans, BUCKETS[-1])
    full, notes = 1 / full_s if full_s else None, plans.notes
    if plans.pass_s:  # the disk, whatever is computed meanwhile
        most = 1 / plans.pass_s
        one, full = min(one or most, most), min(full or most, most)
    elif one is None:
        notes = ("speeds are unknown: nothing was measured for this", *notes)
    if options.kv_type != kv_type:
        notes = (f"speeds are those with {kv_type} keys and values, as long texts were measured", *notes)
    return Foreseen(
        context,
        one,
        full,
        many,
        dict(plans.memory),
        {name: dict(bill) for name, bill in plans.devices.items()},
        plans.streamed_bytes,
        bool(plans.expected),
        plans.plan(1).threads,
        options.kv_type,
        notes,
    )


def _known(model: Model) -> Forecast | None:
    return model.pilot.forecast if isinstance(model, PlannedModel) and model.pilot else None


def _rate(plans: PlanSet, bucket: str) -> float | None:
    """Tokens per second of typical passes, as they are predicted."""
    if (e := plans.expected.get(bucket)) is None:
        return None
    seconds = 0.0
    for stage in plans.plans[bucket].stages:
        times = [e.segments[s.name][0] for s in stage if s.name in e.segments]
        if not times:
            return None
        seconds += max(times)  # those of a stage run side by side
    return e.tokens / seconds if seconds else None
