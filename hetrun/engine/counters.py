"""What the engine has to do and has done, for who looks at it from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetrun.client.events import Event
from hetrun.client.queries import Counts
from hetrun.engine.pictures.store import PictureCounts
from hetrun.engine.request import ActiveRequest
from hetrun.executor.interface import Model
from hetrun.executor.stats import Stats


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """The engine's model, its requests, and what became of others."""

    model: Model
    counts: Counts
    running: Sequence[ActiveRequest]
    displaced: Sequence[ActiveRequest]  # gave up their places
    waiting: Sequence[ActiveRequest]


class RequestTally:
    """Sums over all requests, as their receivers hear of it.

    Written by the engine's thread, read from any: each sum by itself is right.
    """

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._prompt_tokens = self._cached_tokens = self._answer_tokens = 0
        self._drafted = self._accepted = self._begun = 0
        self._first_token_s = 0.0

    def counting(self, on_event: Callable[[Event], None]) -> Callable[[Event], None]:
        """The same receiver, with what it hears counted."""

        def counted(event: Event) -> None:
            if event.kind == "token":
                self._answer_tokens += 1
            elif event.last:
                self._ended(event)
            on_event(event)

        return counted

    def counts(self, stats: Stats, pictures: PictureCounts) -> Counts:
        """What there is by now."""
        return Counts(
            dict(self._requests),  # `asdict` makes no copy of a Counter
            self._prompt_tokens,
            self._cached_tokens,
            self._answer_tokens,
            self._drafted,
            self._accepted,
            self._begun,
            self._first_token_s,
            stats.steps,
            stats.step_seconds,
            *pictures,
        )

    def _ended(self, event: Event) -> None:
        self._requests["error" if event.kind == "error" else event.finish_reason or "stop"] += 1
        self._prompt_tokens += event.usage.prompt_tokens
        self._cached_tokens += event.usage.cached_tokens
        self._drafted += event.timings.drafted
        self._accepted += event.timings.accepted
        if event.timings.ttft_s:
            self._begun += 1
            self._first_token_s += event.timings.ttft_s
