"""Where requests are answered."""

from __future__ import annotations

from typing import Protocol

from hetrun.batch.asks import Ask
from hetrun.batch.results import Reply
from hetrun.errors import HetrunError


class Away(HetrunError):
    """This place does not answer now; the same request may be answered elsewhere, or later."""

    def __init__(self, why: str, after_s: float | None = None, blameless: bool = False) -> None:
        super().__init__(why)
        self.after_s = after_s  # when to come again, where it said so
        self.blameless = blameless  # it had not begun with the request, which is not what it died of


class Place(Protocol):
    """A server: this process' own, or one that is somewhere."""

    name: str
    lanes: int  # requests that it gets at a time

    async def answer(self, ask: Ask) -> Reply:
        """The answer, complete; Away if there is none, EngineStopped if there will be none here any more."""
        ...
