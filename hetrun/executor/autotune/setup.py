"""What the autotuner gets besides the parts of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetrun.backend import Backend, Precision
from hetrun.executor.loading.device_memory import Own
from hetrun.graph import Graph
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.online import OnlinePlanner, PlanConditions, PlannerInputs, Proposal
from hetrun.planner.plan import PlanSet
from hetrun.planner.residency import Copy
from hetrun.planner.weight_sizes import RowBytes
from hetrun.system.units import format_bytes


@dataclass(frozen=True, slots=True)
class Setup:
    """What the autotuner gets besides the parts of the model."""

    home: Mapping[str, str]  # unit -> the backend that holds it from the beginning
    candidates: tuple[str, ...]  # backends that may be chosen
    threads: tuple[int, ...]  # ascending
    room: int  # bytes for weights, and for what backends hold besides
    context: int
    eager: bool  # bring in whatever pays in the long run, before the first request; else once it has paid
    memory: Path | None  # where times are kept
    precision: Precision = "exact"
    wide: tuple[int, ...] = ()  # of the threads those that keep all cores busy; empty: only the most do
    own: Own = field(default_factory=dict)  # what devices may take of the memory that they have to themselves
    rows: RowBytes = lambda ops: 0  # of the keys and values of a text of the usual length
    host_ubatch: int = 0  # the most tokens of passes in which the host computes, if devices take more


def planner_for(
    graph: Graph, backends: Mapping[str, Backend], forecast: WorkTimes, setup: Setup
) -> OnlinePlanner:
    """The planner that measures; where a backend works by itself, one that also plans for both at once."""
    kind = OnlinePlanner
    if any(backends[name].asynchronous for name in setup.candidates):
        from hetrun.planner.two_device.planner import ConcurrentPlanner as kind  # needed only here
    inputs = PlannerInputs(
        threads=setup.threads,
        candidates=setup.candidates,
        precision=setup.precision,
        wide=setup.wide,
        host_ubatch=setup.host_ubatch,
        own=setup.own,
        rows=setup.rows,
    )
    return kind(graph, backends, forecast, inputs)


def home_of(planner: OnlinePlanner, setup: Setup) -> frozenset[Copy]:
    """Where each unit is from the beginning."""
    return frozenset((i, setup.home[unit.scope]) for i, unit in enumerate(planner.units))


def planned(planner: OnlinePlanner, plans: PlanSet, setup: Setup) -> PlanSet:
    """What a model would be run by, as far as times are known already, and what could come later."""
    home = home_of(planner, setup)
    own_room = {name: own.room for name, own in setup.own.items()}
    now = PlanConditions(setup.room, home, home, frozenset(), {}, {}, eager=setup.eager, own_room=own_room)
    proposal = planner.propose(plans, now)
    found = proposal.plans if proposal else planner.annotate(plans, now)
    if setup.eager:
        return found
    later = planner.propose(found, replace(now, eager=True))
    return replace(found, notes=(*found.notes, *_may_come(later))) if later and later.bring else found


def _may_come(later: Proposal) -> Iterator[str]:
    """What would pay in the long run, for each backend."""
    bill = later.plans.memory
    for name in sorted({name for _, name in later.bring}):
        size = bill.get(f"copies for {name}", 0) + bill.get(f"{name} itself", 0)
        yield (
            f"{format_bytes(size)} for {name} may come later, once prompts have lost more time without it "
            f"than it takes to bring it in: {later.reason}"
        )
