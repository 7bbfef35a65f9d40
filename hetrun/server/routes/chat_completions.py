"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hetrun.client.events import Event, TokenLogprob
from hetrun.server import logprobs as scores
from hetrun.server.body import json_object
from hetrun.server.chat import chat_order
from hetrun.server.client_id import asker
from hetrun.server.json_stream import LazyList, json_text
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.query import counted, few
from hetrun.server.request import Order
from hetrun.server.response_driver import (
    AnswerFrame,
    ChoiceStream,
    ChoicesWriter,
    Json,
    finish_reason,
    pieces_of,
    prompt_progress,
    respond,
    totals,
    usage_chunk,
)
from hetrun.server.routes.models import meant
from hetrun.server.service import Service
from hetrun.server.sse import EventStream
from hetrun.server.usage import UsageSum
from hetrun.text.answers.reading import ChoiceReader


def routes(service: Service) -> list[Route]:
    async def read(request: Request) -> tuple[Service, Order]:
        body = await json_object(request)
        here = await meant(body, service)
        loaded = await service.pictures.loaded(body)
        return here, chat_order(body, await here.info(), here, asker(request, body), loaded)

    async def complete(request: Request) -> Response:
        here, order = await read(request)
        return await respond(
            request, here, order, whole=lambda order: ChoicesWriter(order, whole), stream=ChatStream
        )

    async def count(request: Request) -> Response:
        here, order = await read(request)
        return await counted(here, order.prompts[0])

    crowd = Middleware(Crowd, most_requests=service.most_requests)
    paths = ("/v1/chat/completions", "/chat/completions")
    return [
        *(Route(path, complete, methods=["POST"], middleware=[crowd]) for path in paths),
        *(Route(f"{path}/input_tokens", count, methods=["POST"], middleware=few()) for path in paths),
    ]


def whole(order: Order, found: Sequence[ChoiceStream]) -> Json:
    """The whole answer."""
    choices = [_choice(i, choice, order) for i, choice in enumerate(found)]
    more = totals(order, found)
    if order.wanted.prompt is not None:
        # The first token of the prompt has none.
        more["prompt_logprobs"] = LazyList([None], map(scores.ranked, found[0].prompt_scores))
    return AnswerFrame(order.info, "chat.completion", "chatcmpl").body(choices, **more)


def _choice(index: int, choice: ChoiceStream, order: Order) -> Json:
    message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reader:
        message = choice.reader.message(choice.pieces)
    logprobs = None if order.wanted.answer is None else _content(choice.scores)
    return {
        "index": index,
        "message": message,
        "finish_reason": _reason(choice.finish_reason, choice.reader),
        "logprobs": logprobs,
    }


def _reason(reason: str, reader: ChoiceReader | None) -> str:
    """The reason for the end; an answer that was cut off says so even if it has calls."""
    return "tool_calls" if reason == "stop" and reader and reader.calls else reason


def _read(reader: ChoiceReader, event: Event) -> Iterator[tuple[Json, Json | None]]:
    """An event's additions to a choice, as deltas; the first has the token's log-probability."""
    logprobs = None if event.kind != "token" or event.logprob is None else _content([event.logprob])
    deltas = [reader.delta(piece) for piece in pieces_of(reader, event)]
    for delta in deltas or ([{}] if logprobs else []):
        yield delta, logprobs
        logprobs = None


def _content(found: list[TokenLogprob]) -> Json:
    return {"content": LazyList(map(scores.entry, found)), "refusal": None}


class ChatStream:
    """The answer in chunks, for each choice: the role, texts, the reason for the end; then the usage.

    Chunks are JSON texts, because there is one for each token.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._frame = AnswerFrame(order.info, "chat.completion.chunk", "chatcmpl")
        self._counts = UsageSum(order.tried)
        self._readers = [order.reading.reader() if order.reading else None for _ in range(order.choices)]
        self._usage: Json = {"usage": None} if order.include_usage else {}

    def write(self, index: int, event: Event) -> Iterator[str]:
        if event.kind == "prompt" and not event.progress:
            return
        if not self._frame.has_begun(index):
            self._frame.begin(index, self._chunk(index, {"content": ""}), "content")
            # If there may be calls, it is not known yet whether there will be any text.
            begin = "" if self._readers[index] is None else None
            yield json_text(self._chunk(index, {"role": "assistant", "content": begin}))
        if event.progress:
            yield json_text(self._chunk(index, {}) | {"prompt_progress": prompt_progress(event.progress)})
        elif reader := self._readers[index]:
            for delta, logprobs in _read(reader, event):
                text = delta.get("content")
                if logprobs is None and isinstance(text, str):
                    yield self._frame.with_text(index, text)
                else:
                    yield json_text(self._chunk(index, delta, logprobs))
        elif event.kind == "token" and event.logprob is not None:
            yield json_text(self._chunk(index, {"content": event.text}, _content([event.logprob])))
        elif event.text:
            yield self._frame.with_text(index, event.text)
        if event.kind == "done":
            yield json_text(self._last(index, event))

    def end(self) -> Iterator[str]:
        return usage_chunk(self._order, self._frame, self._counts)

    def response(self, texts: AsyncGenerator[str, None]) -> EventStream:
        return EventStream(texts)

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None) -> Json:
        choice: Json = {"index": index, "delta": delta, "finish_reason": None, "logprobs": logprobs}
        return self._frame.body([choice], **self._usage)

    def _last(self, index: int, event: Event) -> Json:
        """The chunk with the reason for a choice's end; the last of all has the times."""
        reason = _reason(finish_reason(event), self._readers[index])
        choice: Json = {"index": index, "delta": {}, "finish_reason": reason, "logprobs": None}
        complete = self._counts.record(index, event) == self._order.choices
        times = {"timings": self._counts.timings()} if complete and not self._order.include_usage else {}
        return self._frame.body([choice], **self._usage, **times)
