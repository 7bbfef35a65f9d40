"""The contract between front ends and engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from hetrun.client.events import Event, GenerateRequest, ModelInfo, Streaming
from hetrun.client.queries import Question
from hetrun.client.wire_protocol import Stuck

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests are answered now."""

    status: Literal["ok", "loading", "stuck", "failed"]
    progress: float = 1.0
    reason: str = ""  # why the last process ended, or why there is none any more
    stuck: Stuck | None = None
    streaming: Streaming | None = None  # what passes are like where weights come from disk


class ChatClient(Protocol):
    """What the terminal chat and the server know of an engine."""

    @property
    def progress(self) -> float:
        """How far loading has come, from 0 to 1."""

    @property
    def health(self) -> Health:
        """Whether requests are answered now."""

    async def info(self) -> ModelInfo:
        """The model that runs; waits until it is loaded, and raises why there is none (any more)."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """The request's events; the last is `done` or `error`. Closing the generator cancels the request."""

    async def ask(self, question: Question[A]) -> A:
        """The answer to a question that is not for the model; waits until it is loaded, and raises why there
        is none."""
        ...

    async def close(self) -> None:
        """Cancel what runs and let go of the engine."""
