"""A request without a place: it gets one when it is prepared, and there is room."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from hetrun.client.events import GenerateRequest
from hetrun.engine.inbox import Request
from hetrun.engine.input_processor import Prepared
from hetrun.engine.sequence import Running


@dataclass(slots=True)
class Waiting:
    """A request without a place."""

    asked: Request
    prepared: Prepared | None = None
    preparing: Future[None] | None = None
    running: Running | None = None  # as it will run, once its tokens are known

    @property
    def id(self) -> int:
        """Its number."""
        return self.asked.id

    @property
    def client(self) -> str:
        """The client."""
        return self.asked.request.client

    @property
    def priority(self) -> int:
        """Lower ones go first."""
        return self.asked.request.priority

    @property
    def arrived(self) -> float:
        """When it came."""
        return self.asked.arrived


def is_late(arrived: float, request: GenerateRequest, now: float) -> bool:
    """Whether it is not wanted any more."""
    return request.deadline_s is not None and now > arrived + request.deadline_s
