"""The memory that a loaded model may take, and what takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetrun.errors import BudgetError
from hetrun.executor.executor import Executor
from hetrun.executor.model_weights import ModelWeights
from hetrun.memory import breakdown
from hetrun.memory.ledger import Books, granted


class ModelBudget:
    """Changes the budget while the model runs, and lends a part of it to what encodes pictures."""

    def __init__(self, books: Books, executor: Executor, weights: ModelWeights) -> None:
        self._books, self._executor, self._weights = books, executor, weights
        self._lent = 0, 0  # bytes that what encodes pictures holds, and may come to

    def set_ram(self, nbytes: int) -> None:
        """Take at most this many bytes from now on."""
        limit, now = granted(nbytes), self._executor.plans
        self._weights.budget.set_limit(limit)
        plans = self._weights.within(limit) if self._weights.within else replace(now, memory=self.bill())
        if prompts := self._weights.long_prompts:
            plans = prompts.follow(plans, now)
        self._executor.adopt(plans)

    def lend(self, held: int, most: int) -> None:
        """Leave a part of the budget to what encodes pictures: it holds so much, and may come to so much."""
        before, weights = self._lent, self._weights
        self._books.grows(breakdown.PICTURES, "anonymous", held, most)
        try:
            # What comes from disk takes room that is there again by itself.
            if most > before[1] or not (weights.disk or weights.experts):
                weights.budget.set_limit(self._books.granted)
        except BudgetError:
            self._books.grows(breakdown.PICTURES, "anonymous", *before)
            weights.budget.look()
            raise
        self._lent = held, most
        self._executor.adopt(replace(self._executor.plans, memory=self.bill()))

    def bill(self) -> Mapping[str, int]:
        """What takes how much now."""
        self._weights.budget.look()
        return self._books.bill()
