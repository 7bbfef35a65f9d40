"""What reaches the engine thread: the items of its inbox."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hetrun.client.events import GenerateRequest, OnEvent
from hetrun.engine.input_processor import Prepared
from hetrun.engine.loaded_model import Loaded

R = TypeVar("R")


@dataclass(slots=True)
class Job(Generic[R]):
    """A function to be called on the engine thread."""

    id: int
    work: Callable[[Loaded], R]
    done: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False  # its caller does not wait any more
    result: R | None = None
    error: BaseException | None = None


class Aside(Job[R]):
    """One that does nothing to the model, and can be called while a pass stands aside."""


@dataclass(frozen=True, slots=True)
class Request:
    """A text to continue."""

    id: int
    request: GenerateRequest
    on_event: OnEvent
    arrived: float


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that waited for its text or its grammar has it, or cannot have it."""

    id: int
    prepared: Prepared | Exception


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request that is to end."""

    id: int


class Close:
    """The engine is to end."""


Item = Job[Any] | Request | Ready | Cancel | Close
