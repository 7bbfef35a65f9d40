"""Goes on after a failure in the middle of a step: without a backend, or with less of a device's memory."""

from __future__ import annotations

from hetrun.errors import BudgetError, Cancelled
from hetrun.executor.autotune.replanner import Replanner
from hetrun.executor.autotune.tuning_parts import TuningParts
from hetrun.executor.loading.device_memory import less_room, whose_memory
from hetrun.planner.residency import Copy
from hetrun.system.units import format_bytes

FREED = 1 / 8  # of a device's weights go where keys and values need their room, or one unit


class FailureRecovery:
    """Makes the plan one that can run, so that the same step can be taken again."""

    def __init__(self, parts: TuningParts, replanner: Replanner) -> None:
        self._planner, self._executor = parts.model.planner, parts.model.executor
        self._state, self._pool, self._weights = parts.state, parts.pool, parts.weights
        self._active_plan, self._explorer, self._replanner = parts.active_plan, parts.explorer, replanner

    def recover(self, name: str, error: Exception) -> bool:
        """Whether the step that this backend failed in can be taken again now."""
        if isinstance(error, Cancelled) or name not in self._pool.usable():
            return False
        if isinstance(error, BudgetError):
            device = whose_memory(name, self._weights.own)
            if copies := self._last_copies(device):
                return self._free(device, copies)
        if self._pool.is_home(name):
            return False
        self._pool.exclude(name, error)
        self._replanner.replan(f"{name} failed")
        self._executor.forget_threads()
        return name not in self._active_plan.planned.backends

    def _last_copies(self, name: str) -> frozenset[Copy]:
        """The last layers of what a device was brought besides its home: a part of that, in whose place more
        keys and values have room."""
        mine = sorted(c for c in self._state.copies if c[1] == name)
        least, found = FREED * self._planner.sizes.own_total(mine, name), set[Copy]()
        while mine and self._planner.sizes.own_total(found, name) <= least:
            found.add(mine.pop())
        return frozenset(found)

    def _free(self, name: str, copies: frozenset[Copy]) -> bool:
        """A text is longer than a device has room for beside its weights: some of these go for good."""
        self._explorer.close()  # it may have been lent some of them
        weights, mine = self._weights, {part for part in self._state.parts if part[0] == name}
        freed = self._planner.sizes.claimed(copies, name)
        weights.own = {**weights.own, name: less_room(weights.own[name], freed)}
        self._state.held -= copies
        self._state.parts -= mine
        self._replanner.replan(f"{name} needs room for keys and values")  # the plan in force cannot stay
        self._active_plan.remove(lambda plan: bool(self._planner.copies_of(plan) & copies))
        if gone := mine - self._state.parts:  # a new plan may need some of them again
            self._active_plan.remove(self._planner.needs_parts)
        weights.drop(copies)
        weights.drop_parts(frozenset(gone))
        self._executor.forget_threads()
        size = format_bytes(freed)
        self._state.note(f"{size} of weights left {name} for keys and values", "given back")
        plans = self._active_plan.planned.plans.values()
        return not any(self._planner.copies_of(plan) & copies for plan in plans)
