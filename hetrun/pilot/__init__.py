"""The pilot keeps the plan of a model good while it runs."""

from __future__ import annotations

from hetrun.pilot.pilot import Pilot as Pilot
from hetrun.pilot.seats import recall_seats as recall_seats
from hetrun.pilot.setup import Setup as Setup
from hetrun.pilot.setup import planned as planned
from hetrun.pilot.setup import planner_for as planner_for
