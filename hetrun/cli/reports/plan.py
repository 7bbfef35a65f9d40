"""`hetrun plan`: what a run would do, without loading the model."""

from __future__ import annotations

import json

from hetrun.api.local_model import make_plan
from hetrun.cli.progress import loading
from hetrun.config import Settings
from hetrun.engine.query_handlers import cores_of, plan_json
from hetrun.system.core_sets import in_ranges
from hetrun.system.terminal_text import visible
from hetrun.system.units import counted


def print_plan(settings: Settings, as_json: bool) -> None:
    """The plan for the settings' model."""
    from hetrun.tools.outlook import with_outlook

    with loading("measuring memory and products") as tell:
        plans = with_outlook(make_plan(settings), settings, tell)
    if as_json:
        print(json.dumps(plan_json(plans), indent=1))
        return
    some = cores_of(plans)
    print(visible(plans.to_text()))
    for n in sorted(some):
        print(f"{counted(n, 'thread')}: {some[n].name}, CPU {in_ranges(some[n].cpus)}")
