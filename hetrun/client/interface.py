"""The contract between front ends and engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from hetrun.client.events import Event, GenerateRequest, ModelInfo, Streaming
from hetrun.client.queries import Question
from hetrun.client.wire_protocol import StepStalled

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests are answered now."""

    status: Literal["ok", "loading", "stuck", "failed"]
    progress: float = 1.0
    reason: str = ""  # why the last process ended, or why no further one is started
    stuck: StepStalled | None = None
    streaming: Streaming | None = None  # statistics of passes, if weights come from disk


class ChatClient(Protocol):
    """An engine, as the terminal chat and the server see it."""

    @property
    def progress(self) -> float:
        """The loading progress, from 0 to 1."""

    @property
    def health(self) -> Health:
        """Whether requests are answered now."""

    async def info(self) -> ModelInfo:
        """The running model; waits until it is loaded, and raises if there is none (any more)."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """The request's events; the last is `done` or `error`. Closing the generator cancels the request."""

    async def ask(self, question: Question[A]) -> A:
        """The answer to a query that is not a generation; waits until the model is loaded, and raises if
        there is none."""
        ...

    async def close(self) -> None:
        """Cancel running requests and release the engine."""
