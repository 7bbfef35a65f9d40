"""What a model may take of memory, what it holds besides weights, and the room that is left for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetrun.backend import Backend, WeightUse
from hetrun.executor.loading.context_length import ContextPlanner
from hetrun.executor.loading.memory_estimates import MAX_SEQUENCES, besides, in_parts, work_bytes
from hetrun.executor.mtp import PlannedBlock
from hetrun.memory import breakdown
from hetrun.memory.ledger import MemoryGrant
from hetrun.planner.options import Options
from hetrun.planner.plan import PlanSet


class LoadBudget:
    """The memory that a model is granted, and what fits into it."""

    def __init__(
        self,
        options: Options,
        contexts: ContextPlanner,
        backends: Mapping[str, Backend],
        *,
        granted: MemoryGrant,
        to_come: int,
        block: PlannedBlock | None,
    ) -> None:
        """So much of libraries is still `to_come`. `block`: that predicts one more token."""
        self._options, self._contexts, self._backends = options, contexts, backends
        self.granted, self.block = granted, block
        self._to_come = to_come
        self.spared = 0  # bytes of the process that writes templates that come out of the reserve

    @property
    def nbytes(self) -> int:
        """All that may be taken."""
        return self.granted.nbytes

    def parts(self) -> Mapping[str, int]:
        """What is held besides weights, keys and values, as it is measured now."""
        parts = self._options.besides or in_parts(
            besides(self._contexts.source.vocabulary_entries, self._to_come), self._options.front
        )
        if self.spared:
            parts = {**parts, breakdown.HELPERS: parts.get(breakdown.HELPERS, 0) - self.spared}
            parts = {name: size for name, size in parts.items() if size > 0}
        return {**parts, breakdown.MTP: self.block.nbytes} if self.block else parts

    def besides(self) -> int:
        """Bytes of these."""
        return sum(self.parts().values())

    def weights(self, wanted: Mapping[str, Sequence[WeightUse]]) -> int:
        """Bytes of weights that backends hold in RAM."""
        return sum(self._backends[name].resident_bytes(uses) for name, uses in wanted.items())

    def fits(self, plans: PlanSet, wanted: Mapping[str, Sequence[WeightUse]]) -> bool:
        """Whether all weights have room beside a text of the usual length."""
        held = self.besides() + self.weights(wanted) + work_bytes(self._contexts.graph, plans.ubatch)
        return held + self._contexts.usual_kv(plans) <= self.nbytes

    def is_enough(self, held: int, plans: PlanSet) -> bool:
        """Whether the shortest of texts has room beside what is `held`."""
        return held + self._contexts.least_kv(plans) <= self.nbytes

    def room(self, plans: PlanSet, held: int) -> int:
        """What is left beside that, once a text of the usual length has room for its keys and values; where
        not even that fits, beside the shortest."""
        left, contexts = self.nbytes - held, self._contexts
        room = left - max(contexts.usual_kv(plans), contexts.short_kv(plans, contexts.usual))
        return room if room > 0 else max(0, left - contexts.least_kv(plans))

    def kv_of_all(self, one: int, held: int) -> int:
        """Bytes of the keys and values of all sequences beside what is `held`; while weights come from disk,
        they may have all of that."""
        return max(one, min(MAX_SEQUENCES * one, self.nbytes - held))
