"""The best placement of a model's units that there is, by what was measured of each: what a plan is held
against."""

from __future__ import annotations

from hetrun.executor.planned_model import PlannedModel
from hetrun.planner.milp import Programme
from hetrun.planner.two_device.cost import PassSetting
from hetrun.planner.two_device.planner import ConcurrentPlanner

LONGEST_S, GAP = 20.0, 1e-3
Way = tuple[float, float, int]  # seconds in the chain, seconds on the link, bytes in the GPU's own memory


def best_seconds(model: PlannedModel, depth: int) -> float | None:
    """Seconds of a pass of one token: the chain, or the link where that takes longer; None where something
    was not measured."""
    assert model.autotuner
    planner = model.autotuner.planner
    if not isinstance(planner, ConcurrentPlanner):
        return None
    at = PassSetting(1, float(max(1, depth)), model.plans.plan(1).threads)
    room = {name: own.room for name, own in ((n, b.granted) for n, b in model.backends.items()) if own}
    ways = [_ways(planner, i, at) for i in range(len(planner.units))]
    return None if not all(ways) else least(ways, room)


def _ways(planner: ConcurrentPlanner, unit: int, at: PassSetting) -> dict[str, Way]:
    """What a unit takes on each backend that can run it and was measured."""
    scope, found = planner.units[unit].scope, dict[str, Way]()
    inside = [o for layer in planner.sides.layers for o in layer if o.scopes[0].startswith(f"{scope}.")]
    outside = [o for o in planner.sides.outside if o.name == scope]
    for name in planner.candidates:
        costs = [planner.sides.cost(o, name, at) for o in inside or outside]
        if costs and None not in costs:
            known = [c for c in costs if c]
            fixed = sum(c.fixed for c in known) - max(c.fixed for c in known)  # operations share a call
            chain, load = sum(c.seconds for c in known) - fixed, sum(c.load for c in known)
            found[name] = chain, load, planner.sizes.own.get((unit, name), 0)
    return found


def least(ways: list[dict[str, Way]], room: dict[str, int]) -> float | None:
    """The least makespan of all placements, exactly."""
    scale = sum(max(chain + load for chain, load, _ in unit.values()) for unit in ways)
    if not scale:
        return 0.0
    lp = Programme()
    longest = lp.share(1.0)
    chosen = [{name: lp.binary(0.0) for name in unit} for unit in ways]
    for unit in chosen:
        lp.equal(dict.fromkeys(unit.values(), 1.0), 1)
    pairs = [(x, ways[i][name], name) for i, unit in enumerate(chosen) for name, x in unit.items()]
    lp.at_most({longest: -1.0} | {x: chain / scale for x, (chain, _, _), _ in pairs}, 0)
    lp.at_most({longest: -1.0} | {x: load / scale for x, (_, load, _), _ in pairs}, 0)
    for name, nbytes in room.items():
        there = {x: float(size) for x, (_, _, size), other in pairs if other == name}
        if there:
            lp.at_most(there, nbytes)
    found = lp.solve(GAP, LONGEST_S)
    if found is None:
        return None
    mine = [way for x, way, _ in pairs if found[x]]
    return max(sum(chain for chain, _, _ in mine), sum(load for _, load, _ in mine))
