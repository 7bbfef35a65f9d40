"""Asks the planner for a better plan, and puts it into force with the weights that it needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hetrun.errors import BudgetError, Cancelled
from hetrun.executor.autotune.drift import Watcher
from hetrun.executor.autotune.tuning_parts import TuningParts
from hetrun.executor.loading.device_memory import within
from hetrun.planner.online import PlanConditions, Proposal
from hetrun.planner.residency import Copy

log = logging.getLogger(__name__)


class Replanner:
    """Plans anew for what is known now."""

    def __init__(self, parts: TuningParts, watcher: Watcher) -> None:
        model = parts.model
        self._planner, self._executor = model.planner, model.executor
        self._kv, self._setup = model.kv, model.setup
        self._state, self._pool, self._weights = parts.state, parts.pool, parts.weights
        self._active_plan, self._explorer, self._watcher = parts.active_plan, parts.explorer, watcher

    def now(
        self, waiting: int = 0, eager: bool = False, ran: Mapping[str, float] | None = None
    ) -> PlanConditions:
        """What a plan must suit at this moment."""
        state = self._state
        recent = {b: r for b, r in self._executor.recent.items() if r.passes}
        return PlanConditions(
            room=self._setup.room,
            home=state.home,
            held=frozenset(state.held),
            started=frozenset(state.started),
            depth={b: r.depth for b, r in recent.items()},
            passes={b: r.passes for b, r in recent.items()},
            waiting=waiting,
            eager=eager,
            parts=state.parts,
            kv_bytes=self._kv.used_bytes,
            own_room={name: own.room for name, own in self._weights.own.items()},
            ran=ran or {},
        )

    def replan(
        self,
        cause: str,
        *,
        waiting: int = 0,
        eager: bool = False,
        first: bool = False,
        ran: Mapping[str, float] | None = None,
    ) -> bool:
        """Ask the planner; whether another plan is in force or on trial now. The `first` is in force at once,
        unless it rests on rough times. `ran`: tokens for which copies may be brought in that would have
        paid."""
        self._active_plan.tell_planner()
        now = self.now(waiting, eager, ran)
        self._planner.candidates = tuple(self._pool.usable())
        plans = within(self._active_plan.planned, self._weights.own)
        proposal = self._planner.propose(plans, now)
        if proposal is None:
            self._active_plan.adopt(self._planner.annotate(plans, now))
            self._active_plan.offer_alone(self._pool.complete())
            self._watcher.watch(self._active_plan.planned, now, self._pool.usable())
            return False
        return self._bring(proposal, now) and self._adopt(proposal, now, cause, first)

    def _bring(self, proposal: Proposal, now: PlanConditions) -> bool:
        """Whether the weights are there that a plan needs; a backend that cannot take them is excluded."""
        try:
            if proposal.bring or proposal.parts - now.parts:
                self._explorer.close()  # it may have been lent some of them
            self._weights.bring(proposal.bring)
            self._weights.bring_parts(proposal.parts)
        except Cancelled:
            raise
        except Exception as e:  # a plugin may fail in any way, and the plan stays as it is
            if isinstance(e, BudgetError) and not proposal.bring:  # what is free may lie in pieces
                log.info("a better plan does not fit into memory (%s): %s", proposal.reason, e)
                return False
            for name in {b for _, b in proposal.bring} | {b for b, _ in proposal.parts - now.parts}:
                if not self._pool.is_home(name):
                    self._pool.exclude(name, e)
            return False
        return True

    def _adopt(self, proposal: Proposal, now: PlanConditions, cause: str, first: bool) -> bool:
        """Put a plan into force, or on trial; whether it is new."""
        rough = any(map(self._active_plan.rough, proposal.plans.plans.values()))
        direct = proposal.must or (first and not rough)
        # Parts of weights come and go with the plans that share them out: no two such are there at once.
        if proposal.parts or proposal.spare:
            self._active_plan.remove(self._planner.needs_parts)
        new = self._active_plan.adopt(proposal.plans, direct, proposal.also)
        self.drop(proposal.drop)
        self._weights.drop_parts(proposal.spare)
        self._state.parts = proposal.parts
        self._active_plan.offer_alone(self._pool.complete())
        if new:
            change = self._state.note(f"{cause}: {proposal.reason}", "in force" if direct else "proposed")
            self._watcher.changed(proposal.plans, change.at)
        self._watcher.watch(proposal.plans, now, self._pool.usable())
        return new

    def drop(self, copies: frozenset[Copy]) -> None:
        """Give the memory of copies back, and forget the plans that need them."""
        if copies:
            self._explorer.close()  # it may have been lent some of them
            self._weights.drop(copies)
            self._active_plan.remove(lambda plan: bool(self._planner.copies_of(plan) & copies))
