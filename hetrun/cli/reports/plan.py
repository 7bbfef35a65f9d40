"""`hetrun plan`: what a run would do, without loading the model."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from hetrun.api.local_model import make_plan
from hetrun.api.model_path import model_path
from hetrun.cli.progress import loading
from hetrun.config import Settings
from hetrun.engine.query_handlers import cores_of, plan_json
from hetrun.executor.autotune.cpu_contention import others_running
from hetrun.loader.open_model import open_model
from hetrun.planner.plan import PlanSet
from hetrun.system.core_sets import in_ranges
from hetrun.system.terminal_text import visible
from hetrun.system.units import counted

BUSY = 0.5  # cores: with fewer, speeds hardly change


def print_plan(settings: Settings, as_json: bool) -> None:
    """The plan for the settings' model."""
    from hetrun.tools.outlook import with_outlook

    with loading("measuring memory and products") as tell:
        source = open_model(model_path(settings))
        plans = with_outlook(make_plan(settings, source), settings, source, tell)
        plans = beside_others(with_guesses(plans, settings))
    if as_json:
        print(json.dumps(plan_json(plans), indent=1))
        return
    some = cores_of(plans)
    print(visible(plans.to_text()))
    for n in sorted(some):
        print(f"{counted(n, 'thread')}: {some[n].name}, CPU {in_ranges(some[n].cpus)}")


def with_guesses(plans: PlanSet, settings: Settings) -> PlanSet:
    """With a remark where runs may read less for a token than the plan says, as guesses share a pass."""
    if settings.spec == "off" or not plans.weights or not plans.weights.read:
        return plans
    said = (
        "these are passes of one token each; tokens that are guessed from the text (--spec) are verified "
        "together, so where guesses are right a run reads less for each token and answers faster"
    )
    return replace(plans, notes=(*plans.notes, said))


def beside_others(plans: PlanSet) -> PlanSet:
    """With a remark where other programs compute now: its speeds are those of a quiet machine."""
    busy, cores = others_running(), len(os.sched_getaffinity(0))
    if busy < BUSY:
        return plans
    said = (
        f"other programs keep {min(busy, cores):.1f} of {counted(cores, 'core')} busy now: until they end, "
        "runs are slower than these speeds"
    )
    return replace(plans, notes=(said, *plans.notes))
