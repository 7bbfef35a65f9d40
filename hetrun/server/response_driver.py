"""From the events of a request's choices to its answer, whole or in chunks; shared by all APIs."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from hetrun import __version__
from hetrun.client.events import Event, ModelInfo, PromptProgress, TokenLogprob
from hetrun.errors import DeadlineExceeded
from hetrun.server import parallel_sampling
from hetrun.server.disconnect import unless_gone
from hetrun.server.json_stream import TURN_S, json_response, json_text, long_text
from hetrun.server.parallel_sampling import Numbered
from hetrun.server.request import Order
from hetrun.server.service import Service
from hetrun.server.sse import EventStream
from hetrun.server.usage import UsageSum
from hetrun.text.answers.reading import ChoiceReader
from hetrun.text.tool_parsers.parts import Piece

LATE_S = 1.0  # how long after its deadline the server itself ends a request

Json = dict[str, object]
Events = AsyncGenerator[Numbered, None]


class WholeWriter(Protocol):
    """Makes an answer of all of its events."""

    def add(self, index: int, event: Event) -> None:
        """Record an event of a choice."""
        ...

    def answer(self) -> object:
        """The answer, after the last event: JSON, or its bytes."""
        ...


class StreamWriter(Protocol):
    """Makes a streamed answer of its events, one by one."""

    def write(self, index: int, event: Event) -> Iterable[str | Json]:
        """What is sent for an event of a choice: JSON texts, or objects that may be long."""
        ...

    def end(self) -> Iterable[str]:
        """What is sent after the last event."""
        ...

    def response(self, texts: AsyncGenerator[str, None]) -> EventStream:
        """The response that sends these texts."""
        ...


async def respond(
    request: Request,
    service: Service,
    order: Order,
    *,
    whole: Callable[[Order], WholeWriter],
    stream: Callable[[Order], StreamWriter],
) -> Response:
    """The response to an order, by a writer that is made with the first event."""
    events = parallel_sampling.events(service.client, order)
    try:
        # Errors in a request occur before its first token, while a status can still be sent.
        first = await unless_gone(request.receive, _first(events, order))
        complete = _prepend(first, events)
        if order.stream:
            writer = stream(order)
            return writer.response(_texts(order, complete, writer))
        return await unless_gone(request.receive, _in_one(order, complete, whole(order)))
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


async def _prepend(first: Numbered, rest: Events) -> Events:
    """All events; closing it closes the rest."""
    try:
        yield first
        async for numbered in rest:
            yield numbered
    finally:
        await rest.aclose()


async def _in_one(order: Order, events: Events, writer: WholeWriter) -> Response:
    """The whole answer; an error of one choice ends all."""
    begin = perf_counter()
    async with aclosing(events):
        async for index, event in events:
            if event.kind == "error":
                raise order.failure(event.error)
            writer.add(index, event)
            if perf_counter() - begin > TURN_S:
                await asyncio.sleep(0)  # all events may already be here; give other requests a turn
                begin = perf_counter()
    answer = writer.answer()
    if isinstance(answer, bytes):
        return Response(answer, media_type="application/json")
    return await json_response(answer)


async def _texts(order: Order, events: Events, writer: StreamWriter) -> AsyncGenerator[str, None]:
    """The texts of a stream; an error of one choice ends all."""
    async with aclosing(events):
        async for index, event in events:
            if event.kind == "error":
                raise order.failure(event.error)
            for said in writer.write(index, event):
                yield said if isinstance(said, str) else await long_text(said)
    for text in writer.end():
        yield text


@dataclass
class ChoiceStream:
    """One answer as it arrives; a prompt's first choice also has the tokens of the prompt."""

    first: ChoiceStream | None = None  # of the same prompt; None: it is this one
    reader: ChoiceReader | None = None
    texts: list[str] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)  # that the reader found
    end: Event = field(default_factory=lambda: Event("done"))
    prompt_pieces: tuple[bytes, ...] = ()
    prompt_scores: list[TokenLogprob] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Record an event of this choice."""
        if event.kind == "prompt":
            self.leader.add_prompt(event)
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

    def add_prompt(self, event: Event) -> None:
        """Record what an event says of the prompt."""
        self.prompt_pieces = event.echo or self.prompt_pieces
        self.prompt_scores += event.prompt_logprobs

    @property
    def leader(self) -> ChoiceStream:
        """The first choice of the same prompt."""
        return self.first or self

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str:
        """Why it ended."""
        return finish_reason(self.end)


class ChoicesWriter:
    """Collects the choices of an answer, by their numbers, and makes the answer of them at the end."""

    def __init__(self, order: Order, format: Callable[[Order, list[ChoiceStream]], object]) -> None:
        self._order = order
        self._format = format
        self._choices: list[ChoiceStream] = []
        for i in range(order.choices):
            first = self._choices[i - i % order.tried] if i % order.tried else None
            self._choices.append(ChoiceStream(first, order.reading.reader() if order.reading else None))

    def add(self, index: int, event: Event) -> None:
        self._choices[index].add(event)

    def answer(self) -> object:
        return self._format(self._order, self._choices)


def totals(order: Order, choices: Iterable[ChoiceStream]) -> Json:
    """The usage of complete choices."""
    counts = UsageSum(order.tried)
    for index, choice in enumerate(choices):
        counts.record(index, choice.end)
    return {"usage": counts.usage(), "timings": counts.timings()}


class AnswerFrame:
    """The fields that all chunks of one answer share, in OpenAI's format."""

    def __init__(self, info: ModelInfo, kind: str, prefix: str) -> None:
        self._head: Json = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind}
        self._head |= {"created": int(time.time()), "model": info.id}
        self._head |= {"system_fingerprint": f"hetrun-{__version__}"}
        self._around: dict[int, tuple[str, str]] = {}  # the JSON before and after the text of each choice

    def body(self, choices: list[Json], **more: object) -> Json:
        """The answer, or a chunk of it."""
        return self._head | {"choices": choices} | more

    def has_begun(self, index: int) -> bool:
        """Whether `begin` was called for a choice."""
        return index in self._around

    def begin(self, index: int, chunk: Json, field: str) -> None:
        """Give a choice's chunks of text the JSON of this one, in which the field is empty."""
        # Quotes within a JSON string are escaped, so this can only be the field.
        before, after = json_text(chunk).split(f'"{field}":""')
        self._around[index] = f'{before}"{field}":', after

    def with_text(self, index: int, text: str) -> str:
        """The chunk of a choice as JSON, with this text."""
        before, after = self._around[index]
        return f"{before}{json_text(text)}{after}"


def usage_chunk(order: Order, frame: AnswerFrame, counts: UsageSum) -> Iterator[str]:
    """What a stream of OpenAI's ends with: the usage of all choices, if it was asked for."""
    if order.include_usage:
        yield json_text(frame.body([], usage=counts.usage(), timings=counts.timings()))


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
