"""Plans that stop before the output matrix, for passes of which only hidden states are wanted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hetrun.graph import Value
from hetrun.planner.plan import Plan, Stages, up_to


class HiddenPlans:
    """What plans are up to the hidden states; made once for each, so that what is compiled is found again."""

    def __init__(self, hidden: Value) -> None:
        self._hidden = hidden
        # By identity; each with what it was made of, so that nothing else gets the same id.
        self._stages: dict[int, tuple[Stages, Stages]] = {}
        self._plans: dict[int, tuple[Plan, Plan]] = {}

    def of(self, plan: Plan) -> Plan:
        """The plan without what hidden states do not need."""
        found = self._plans.get(id(plan))
        if found is None:
            found = self._plans[id(plan)] = plan, replace(plan, stages=self._of(plan.stages))
        return found[1]

    def _of(self, stages: Stages) -> Stages:
        found = self._stages.get(id(stages))
        if found is None:
            found = self._stages[id(stages)] = stages, up_to(stages, self._hidden)
        return found[1]

    def keep(self, plans: Iterable[Plan]) -> set[int]:
        """Forget what was made of other plans; the ids of the stages that are left."""
        self._plans.clear()
        alive = {id(plan.stages) for plan in plans}
        self._stages = {key: pair for key, pair in self._stages.items() if key in alive}
        return {id(mine) for _, mine in self._stages.values()}
