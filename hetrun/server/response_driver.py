"""From the events of a request's choices to its answer, whole or in chunks; shared by both endpoints."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hetrun import __version__
from hetrun.client.events import Event, ModelInfo, PromptProgress, TokenLogprob
from hetrun.errors import DeadlineExceeded
from hetrun.server import parallel_sampling
from hetrun.server.disconnect import unless_gone
from hetrun.server.json_stream import json_response, json_text
from hetrun.server.parallel_sampling import Numbered
from hetrun.server.request import Order
from hetrun.server.service import Service
from hetrun.server.sse import EventStream
from hetrun.server.usage import Counts
from hetrun.text.answers.reading import ChoiceReader
from hetrun.text.tool_parsers.parts import Piece

LATE_S = 1.0  # how long after its deadline the server itself ends a request

Json = dict[str, object]
Events = AsyncGenerator[Numbered, None]


@dataclass(frozen=True)
class Answer:
    """The fields that all chunks of one answer share."""

    info: ModelInfo
    kind: str
    prefix: str
    created: int = field(default_factory=lambda: int(time.time()))
    token: str = field(default_factory=lambda: secrets.token_hex(12))

    def body(self, choices: list[Json], **more: object) -> Json:
        """The answer, or a chunk of it."""
        head = {"id": f"{self.prefix}-{self.token}", "object": self.kind, "created": self.created}
        head |= {"model": self.info.id, "system_fingerprint": f"hetrun-{__version__}"}
        return head | {"choices": choices} | more


@dataclass
class Prompt:
    """The prompt's tokens, from the events of its first choice."""

    pieces: tuple[bytes, ...] = ()
    scores: list[TokenLogprob] = field(default_factory=list)

    def saw(self, event: Event) -> None:
        """Record an event of that choice."""
        self.pieces = event.echo or self.pieces
        self.scores += event.prompt_logprobs


@dataclass
class Choice:
    """One answer as it arrives."""

    prompt: Prompt
    texts: list[str] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    end: Event | None = None
    reader: ChoiceReader | None = None
    pieces: list[Piece] = field(default_factory=list)  # that the reader found

    def saw(self, event: Event) -> None:
        """Record an event of this choice."""
        if event.kind == "prompt":
            self.prompt.saw(event)
            return
        if self.reader:
            self.pieces += pieces_of(self.reader, event)
        else:
            self.texts.append(event.text)
        if event.kind == "done":
            self.end = event
            return
        if event.token is not None:
            self.tokens.append(event.token)
        if event.logprob is not None:
            self.scores.append(event.logprob)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str:
        """Why it ended."""
        return finish_reason(self.end or Event("done"))


@dataclass
class Whole:
    """All choices of an answer, complete, by their numbers."""

    choices: list[Choice]
    counts: Counts

    def totals(self) -> Json:
        """The answer's usage."""
        return {"usage": self.counts.usage(), "timings": self.counts.timings()}


MakeWhole = Callable[[Order, Whole], Json]
MakeChunks = Callable[[Order, Events], AsyncGenerator[str, None]]


async def respond(
    request: Request, service: Service, order: Order, whole: MakeWhole, chunks: MakeChunks
) -> Response:
    """The response to an order, in the format of the two functions."""

    async def in_one(events: Events) -> Response:
        return await json_response(whole(order, await gathered(order, events)))

    return await answered(request, service, order, in_one, lambda events: EventStream(chunks(order, events)))


async def answered(
    request: Request,
    service: Service,
    order: Order,
    whole: Callable[[Events], Coroutine[Any, Any, Response]],
    stream: Callable[[Events], EventStream],
) -> Response:
    """The response to an order, made of its events: of all of them at the end, or one by one."""
    events = parallel_sampling.events(service.client, order)
    try:
        # Errors in a request occur before its first token, while a status can still be sent.
        first = await unless_gone(request.receive, _first(events, order))
        if order.stream:
            return stream(_behind(first, events))
        return await unless_gone(request.receive, whole(_behind(first, events)))
    except BaseException:
        await events.aclose()
        raise


async def _first(events: Events, order: Order) -> Numbered:
    """The first event. The engine watches deadlines itself, except during a restart."""
    deadline_s = order.prompts[0].deadline_s
    try:
        async with asyncio.timeout(None if deadline_s is None else deadline_s + LATE_S):
            index, event = await anext(events)
    except TimeoutError:
        late = DeadlineExceeded(f"the engine did not respond within {deadline_s:g} s (deadline_s)")
        raise order.failure(late) from None
    if event.kind == "error":
        raise order.failure(event.error)
    return index, event


async def _behind(first: Numbered, rest: Events) -> Events:
    """All events; closing it closes the rest."""
    try:
        yield first
        async for numbered in rest:
            yield numbered
    finally:
        await rest.aclose()


async def gathered(order: Order, events: Events) -> Whole:
    """All events; an error of one choice ends all."""
    prompts = [Prompt() for _ in order.prompts]
    found = Whole([Choice(prompts[i // order.tried]) for i in range(order.choices)], Counts(order.tried))
    if order.reading:
        for choice in found.choices:
            choice.reader = order.reading.reader()
    try:
        async for index, event in events:
            if event.kind == "error":
                raise order.failure(event.error)
            found.choices[index].saw(event)
            if order.reading:
                await asyncio.sleep(0)  # all events may already be here; give other requests a turn
            if event.kind == "done":
                found.counts.ended(index, event)
    finally:
        await events.aclose()
    return found


def pieces_of(reader: ChoiceReader, event: Event) -> list[Piece]:
    """The text that became certain with an event."""
    return reader.push(
        event.text,
        opened=bool(event.opened),
        last=event.kind == "done",
        cut=event.finish_reason == "length",
    )


def prompt_progress(progress: PromptProgress) -> Json:
    """llama.cpp's object: `processed` of `total` tokens are computed, including those of the `cache`."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.computed,
        "time_ms": round(1000 * progress.seconds),
    }


def finish_reason(event: Event) -> str:
    """Why an answer ended, in OpenAI's terms."""
    # OpenAI has no "cancelled"; no client reads the end of a cancelled answer.
    return "length" if event.finish_reason == "length" else "stop"


class Template:
    """A chunk in which only one text changes: the JSON around it is made once."""

    def __init__(self, chunk: Json, field: str) -> None:
        # Quotes within a JSON string are escaped, so this can only be the field.
        self._before, self._after = json_text(chunk).split(f'"{field}":""')
        self._field = field

    def with_text(self, text: str) -> str:
        """The chunk as JSON."""
        return f'{self._before}"{self._field}":{json_text(text)}{self._after}'
