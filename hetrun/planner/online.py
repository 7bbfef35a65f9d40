"""The planner that measures: for each bucket the backends and threads that take least time here and now.

It knows times only from the forecast, which is fed by a probe at first use and by every step since. It is
asked again while the model runs, and answers with a new plan set where that pays for its price.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetrun.backend import Backend
from hetrun.forecast import Forecast
from hetrun.forms import units
from hetrun.graph import Graph
from hetrun.plan import BUCKETS, Expected, Placement, PlanSet, make_plans
from hetrun.planner.costs import Costs
from hetrun.planner.probe import SMALL
from hetrun.planner.residency import Copies, Copy, Demand, Placed, cost, place_all

START, RATE, HOLDS = "start_s", "upload_bytes_s", "overhead_bytes"  # facts of a backend
WORTH = 0.03  # a new plan must be better by so much, or the same two would take turns
