"""The static planner: the fastest backend that can run an op by a fixed order, and two rules for sizes.

It is the first planner, and the one that stays for machines of which nothing has been measured yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetrun.backend import Backend
from hetrun.errors import OptionError
from hetrun.graph import Graph, Op, in_scope
from hetrun.graph.ops import flops
from hetrun.planner.options import PlannerMachine, Wishes
from hetrun.planner.plan import BUCKETS, BY_ORDER, Buckets, Placement, PlanSet, make_plans, place, share_out
from hetrun.planner.plan_file import load_plan
from hetrun.planner.plugin_planners import Task, buckets_by

# Work per second that a core of the last ten years reaches on a quantised product of many tokens. It is only
# used to keep a single product short, so that a cancel is heard: being wrong by two costs nothing else.
FLOPS_PER_CORE = 200e9
LONGEST_PRODUCT = 0.040  # seconds
LARGEST_UBATCH = 512


class StaticPlanner:
    """Decides once, without measuring."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        order: Sequence[str],
        homes: Sequence[Placement] = (),
        rule: str = "",
        why: str = "",
    ) -> None:
        """`order`: the backends from the most to the least wanted; `homes`: what has its place already;
        `rule`: a package's planner, which decides instead of the order; `why`: the reason for the first of
        the order, if others were left out of it."""
        self._backends, self._rule, self._reason = backends, rule, why
        self._homes = {placement.scope: placement for placement in homes}
        self._order = order

    def plan(self, graph: Graph, machine: PlannerMachine, wishes: Wishes) -> PlanSet:
        """A plan for each bucket."""
        threads = wishes.threads or machine.cores
        alone = [name for name, backend in self._backends.items() if backend.asynchronous]
        ubatch, why = self._ubatch(graph, threads, wishes)
        at_once = 0
        if wishes.plan:
            saved = load_plan(wishes.plan, graph)
            self._check(graph, saved.buckets)
            buckets = {b: (wishes.threads or n, placements) for b, (n, placements) in saved.buckets.items()}
            if not wishes.ubatch:
                ubatch, why = saved.ubatch, f"as saved in {wishes.plan.name}"
                at_once = saved.host_ubatch
        elif self._rule:
            buckets = dict(buckets_by(self._rule, Task(graph, self._backends, self._order, threads)))
            try:
                self._check(graph, buckets)
            except OptionError as e:
                raise OptionError(f"the planner {self._rule}: {e}") from e
        else:
            buckets = dict.fromkeys(BUCKETS, (threads, tuple(self._placements(graph))))
        return PlanSet(make_plans(graph, buckets, alone), ubatch, why, host_ubatch=at_once)

    def _placements(self, graph: Graph) -> list[Placement]:
        """The first backend of the order for everything; another for scopes with something it cannot do."""
        first = self._order[0]
        placements = {"": Placement("", first, self._why(first)), **self._homes}
        for op in graph.ops:
            backend = place([op], tuple(placements.values()))[0].backend
            if op.scope not in placements and not self._backends[backend].supports(op):
                backend = self._first_for(op, [o for o in graph.ops if in_scope(o.scope, op.scope)])
                placements[op.scope] = Placement(op.scope, backend, f"{first} has no {op.kind} for this")
        return list(placements.values())

    def _why(self, backend: str) -> str:
        if self._reason:
            return self._reason
        others = [b for b in self._order if b != backend]
        return f"{BY_ORDER} {' > '.join(self._order)}" if others else "the only backend allowed"

    def _first_for(self, cause: Op, ops: Sequence[Op]) -> str:
        for name in self._order:
            if all(self._backends[name].supports(op) for op in ops):
                return name
        order = ", ".join(self._order)
        raise OptionError(f"none of the backends {order} can run {cause.kind} in {cause.scope}; allow more")

    def _check(self, graph: Graph, saved: Buckets) -> None:
        """Whether the backends of a saved plan are here and can do what it gives them."""
        for placements in dict.fromkeys(placements for _, placements in saved.values()):
            for p in placements:
                if p.backend not in self._backends:
                    what = p.scope or "everything"
                    raise OptionError(f"the plan places {what} on {p.backend}, which cannot work here")
            divided, each = share_out(graph, placements)
            for op, placed in zip(divided.ops, place(divided.ops, each), strict=True):
                if not self._backends[placed.backend].supports(op):
                    raise OptionError(
                        f"the plan places {op.scope} on {placed.backend}, which has no {op.kind} for it"
                    )

    def _ubatch(self, graph: Graph, threads: int, wishes: Wishes) -> tuple[int, str]:
        """How many tokens a pass may have."""
        if wishes.ubatch:
            return wishes.ubatch, "as asked for"
        if own := self._backends[self._order[0]].most_at_once(graph.ops):
            return own, "as many as its device has room for: a pass reads all weights, however many tokens"
        products = [
            flops(op.kind, op.attrs, [w.shape for w in op.weights], 1)
            for op in graph.ops
            if op.kind != "head"
        ]
        largest = max(1, *products)
        limit = LONGEST_PRODUCT * FLOPS_PER_CORE * threads / largest
        ubatch = next(n for n in (LARGEST_UBATCH, 256, 128, 64, 32) if n <= limit or n == 32)
        if ubatch == LARGEST_UBATCH:
            return ubatch, "larger passes are no faster"
        return (
            ubatch,
            f"so that no matrix product takes more than {LONGEST_PRODUCT * 1000:.0f} ms: an answer can be "
            "cancelled only between two of them",
        )
