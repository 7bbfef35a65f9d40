"""Plans of which a part runs: up to the hidden states, or from values on that are there already."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from hetrun.planner.plan import Plan, Stages


class PartialPlans:
    """What is left of plans; made once for each, so that what is compiled is found again."""

    def __init__(self, part: Callable[[Stages], Stages]) -> None:
        """`part`: what of the stages is to run."""
        self._part = part
        # By identity; each with what it was made of, so that nothing else gets the same id.
        self._stages: dict[int, tuple[Stages, Stages]] = {}
        self._plans: dict[int, tuple[Plan, Plan]] = {}

    def of(self, plan: Plan) -> Plan:
        """The part of a plan."""
        found = self._plans.get(id(plan))
        if found is None:
            found = self._plans[id(plan)] = plan, replace(plan, stages=self._of(plan.stages))
        return found[1]

    def known(self, plan: Plan) -> list[Plan]:
        """The same, if it was made already."""
        return [self.of(plan)] if id(plan.stages) in self._stages else []

    def _of(self, stages: Stages) -> Stages:
        found = self._stages.get(id(stages))
        if found is None:
            found = self._stages[id(stages)] = stages, self._part(stages)
        return found[1]

    def keep(self, plans: Iterable[Plan]) -> set[int]:
        """Forget what was made of other plans; the ids of the stages that are left."""
        self._plans.clear()
        alive = {id(plan.stages) for plan in plans}
        self._stages = {key: pair for key, pair in self._stages.items() if key in alive}
        return {id(mine) for _, mine in self._stages.values()}
