"""The memory that a model may take, changed while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from hetrun.errors import BudgetError
from hetrun.events import Streaming
from hetrun.prefixes import Prefixes
from hetrun.stats import Stats


class Budgeted(Protocol):
    """The part of a `Model` that knows how much memory it takes."""

    stats: Stats

    def set_ram(self, nbytes: int) -> None:
        """Take at most so many bytes from now on, everything together; called between two steps.

        Every sequence stays as it is, and so does the context. BudgetError: not now; it says what would do at
        least, and nothing has changed. OptionError: this model never can.
        """
        ...

    def bill(self) -> Mapping[str, int]:
        """What takes how much now."""
        ...

    def streaming(self) -> Streaming | None:
        """What passes are like that read weights from disk; None where all of them are in memory."""
        ...

    def rest(self) -> None:
        """Give the system back what sequences that are gone had."""
        ...


def set_ram(model: Budgeted, nbytes: int, prefixes: Prefixes | None) -> None:
    """Change the budget. Where memory is short cached prompts go first, as everywhere: those that were not
    used for longest, and no more than have to."""
    while True:
        try:
            model.set_ram(nbytes)
            return
        except BudgetError:
            streaming = model.streaming()
            in_vain = streaming is not None and nbytes < streaming.least
            if in_vain or prefixes is None or not prefixes.drop_one():
                raise
            model.rest()


def look(model: Budgeted) -> Stats:
    """What was measured, and what the disk is like by now; on the engine's thread."""
    model.stats.streaming = model.streaming()
    return model.stats
