"""Planners decide: which backend runs what, with how many threads, in passes of which size, and why."""

from __future__ import annotations

from hetrun.planner.rules import Rule as Rule
from hetrun.planner.rules import Task as Task
from hetrun.planner.static import LARGEST_UBATCH as LARGEST_UBATCH
from hetrun.planner.static import StaticPlanner as StaticPlanner
from hetrun.planner.wishes import Machine as Machine
from hetrun.planner.wishes import Options as Options
from hetrun.planner.wishes import Wishes as Wishes
from hetrun.planner.wishes import this_machine as this_machine
