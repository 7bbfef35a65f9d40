"""Where requests are answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from hetrun.errors import HetrunError
from hetrun.tools.batch.request_lines import Ask
from hetrun.tools.batch.result_lines import Reply


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


# --- places that packages bring


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line chose, for places that start engines by themselves."""

    model: str | None = None  # as it was typed: a path, or a name of the hub; None: hetrun's usual one
    settings: Mapping[str, object] = field(default_factory=dict)  # the others by name; only those chosen
    api_key: str | None = field(default=None, repr=False)  # a secret, of servers that run already


class Places(Protocol):
    """What a package registers in `hetrun.workers` under a scheme, for `--workers SCHEME:WHERE`.

    Entered before the first request, and left behind the last: what was started for it ends there. What is
    raised on the way in ends the run, a UserError as one sentence.
    """

    def __call__(self, where: str, wanted: Wanted) -> AbstractAsyncContextManager[Sequence[Place]]: ...


class PluginPlace(Place):
    """A place of a package. What it may not raise is said of the package."""

    def __init__(self, place: Place, fault: Callable[[str | BaseException], HetrunError]) -> None:
        self.name, self.lanes = place.name, place.lanes
        self._place, self._fault = place, fault
        lanes: object = place.lanes
        if not isinstance(lanes, int) or lanes < 1:
            raise fault(f"its place {self.name!r:.80} has {self.lanes!r:.20} lanes, which must be 1 or more")

    async def answer(self, ask: Ask) -> Reply:
        try:
            found: object = await self._place.answer(ask)
        except HetrunError:
            raise
        except Exception as error:
            raise self._fault(error) from error
        if not isinstance(found, Reply):
            raise self._fault(f"what {self.name} answers is no Reply, but {found!r:.80}")
        return found
