"""Planners of packages: a rule says which backend runs what; checking and cutting stay with hetrun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from hetrun.backend import Backend
from hetrun.errors import OptionError
from hetrun.graph import Graph
from hetrun.planner.plan import BUCKETS, Buckets, Placement
from hetrun.system import entry_points

OWN = ("measured", "static")  # hetrun's planners, which are no rules


@dataclass(frozen=True, slots=True)
class Task:
    """What a rule is told."""

    graph: Graph
    backends: Mapping[str, Backend]  # that may be used; ask them with `supports(op)`
    order: Sequence[str]  # their names, from the most to the least wanted
    threads: int  # that the machine has, or the user fixed


class Rule(Protocol):
    """A planner of a package, registered in `hetrun.planners`: asked once, before weights are read."""

    def __call__(self, task: Task) -> Mapping[str, tuple[int, Sequence[Placement]]]:
        """For each of `plan.BUCKETS` the threads and the placements, of which later ones overrule."""
        ...


def buckets_by(name: str, task: Task) -> Buckets:
    """What the rule of that name says. PluginError: it has failed, and is disabled."""
    point = entry_points.find("planners", name)
    if point is None:
        raise OptionError(f"there is no planner {name!r}; there are {', '.join(known())}")
    rule = cast(Rule, entry_points.load(point))
    with entry_points.blamed(
        lambda e: entry_points.leave_out(point, f"it made no plan: {entry_points.in_words(e)}", e)
    ):
        return _checked(rule(task))


def known() -> list[str]:
    """The names that --planner takes."""
    return [*OWN, *entry_points.points("planners")]


def _checked(said: Mapping[str, tuple[int, Sequence[Placement]]]) -> Buckets:
    found = {bucket: (said[bucket][0], tuple(said[bucket][1])) for bucket in BUCKETS}
    for threads, placements in found.values():
        if type(threads) is not int or threads < 1:
            raise ValueError(f"{threads!r} is not a number of threads")
        for p in placements:
            if not isinstance(p, Placement):
                raise TypeError(f"{p!r:.80} is not a Placement")
    return found
