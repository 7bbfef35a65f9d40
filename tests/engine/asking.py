"""Requests to an engine and what comes of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hetrun.client.events import Event, GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.engine.engine import Engine

Open = Callable[..., Engine]
SCRIPTS = {"a": b"Hello, world", "b": b"123456789", "l": b"x" * 1000, "u": "Grüße".encode()}


@dataclass
class Answer:
    """What a request gave so far."""

    events: list[Event] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    id: int = 0

    def __call__(self, event: Event) -> None:
        assert not self.over.is_set(), "an event behind the last one"
        self.events.append(event)
        if event.last:
            self.over.set()

    def wait(self) -> Answer:
        assert self.over.wait(30), f"no end after {self.events}"
        return self

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events)

    @property
    def tokens(self) -> list[int | None]:
        return [e.token for e in self.events[:-1]]

    @property
    def last(self) -> Event:
        return self.events[-1]


def ask(engine: Engine, prompt: str = "a", answer: Answer | None = None, **params: Any) -> Answer:  # noqa: ANN401
    answer = answer or Answer()
    answer.id = engine.submit(GenerateRequest(SamplingParams(**params), text=prompt), answer)
    return answer


def ask_together(engine: Engine, *prompts: str, **params: Any) -> list[Answer]:  # noqa: ANN401
    """Requests that are all in the inbox before the engine looks into it."""
    return engine.call(lambda _: [ask(engine, prompt, **params) for prompt in prompts])
