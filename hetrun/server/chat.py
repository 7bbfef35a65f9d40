"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun import __version__
from hetrun.errors import DeadlineExceeded, OptionError
from hetrun.events import Event, ModelInfo, TokenLogprob, Usage
from hetrun.server.asker import asker
from hetrun.server.body import json_object
from hetrun.server.crowd import Crowd
from hetrun.server.errors import ApiError, api_error
from hetrun.server.fields import ChatOrder, chat_order
from hetrun.server.gone import unless_gone
from hetrun.server.service import Service
from hetrun.server.sse import EventStream, json_text

LATE_S = 1.0  # how much later than its deadline we say by ourselves that a request is late

Json = dict[str, object]


def routes(service: Service) -> list[Route]:
    async def complete(request: Request) -> Response:
        body = await json_object(request)
        info = await service.client.info()
        order = chat_order(body, info, service, asker(request, body))
        events = service.client.stream(order.request)
        try:
            # What is wrong with a request shows before its first token, while a status can still be sent.
            first = await unless_gone(request.receive, _first(events, order.request.deadline_s))
            if first.kind == "error":
                raise _refusal(first.error, order, info)
            answer = Answer(info)
            if order.stream:
                return EventStream(_chunks(answer, order, first, events))
            return JSONResponse(await unless_gone(request.receive, _whole(answer, order, first, events)))
        finally:
            if not order.stream:
                await events.aclose()

    crowd = Middleware(Crowd, most_requests=service.most_requests)
    return [Route("/v1/chat/completions", complete, methods=["POST"], middleware=[crowd])]


async def _first(events: AsyncGenerator[Event, None], deadline_s: float | None) -> Event:
    """The first event. The engine watches deadlines itself, unless it is just being started again."""
    try:
        async with asyncio.timeout(None if deadline_s is None else deadline_s + LATE_S):
            return await anext(events)
    except TimeoutError:
        late = DeadlineExceeded(f"the engine gave no sign within {deadline_s:g} s (deadline_s)")
        return Event("error", error=late)


def _refusal(error: Exception | None, order: ChatOrder, info: ModelInfo) -> ApiError:
    """The answer to a request that failed before its first token."""
    structure = order.request.params.structure
    if order.form and structure and isinstance(error, OptionError) and str(error).startswith(structure.kind):
        # A schema or grammar is looked at where the vocabulary is: the client called it by another name.
        return ApiError(f"{order.form}{str(error).removeprefix(structure.kind)}", order.form, "invalid_value")
    return api_error(error, info.context)


@dataclass(frozen=True)
class Answer:
    """What is the same in every chunk of one answer."""

    info: ModelInfo
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, kind: str, choices: list[Json], **more: object) -> Json:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.info.id}
        return head | {"system_fingerprint": f"hetrun-{__version__}", "choices": choices} | more


async def _whole(answer: Answer, order: ChatOrder, first: Event, rest: AsyncGenerator[Event, None]) -> Json:
    """The answer in one piece."""
    text: list[str] = []
    logprobs: list[Json] = []
    prompt: list[Json | None] = [None]  # nothing comes before the first token
    event = first
    while True:
        if event.kind == "error":
            raise api_error(event.error, answer.info.context)
        text.append(event.text)
        logprobs += _logprobs(event)
        prompt += map(_ranked, event.prompt_logprobs)
        if event.kind == "done":
            break
        event = await anext(rest)
    message = {"role": "assistant", "content": "".join(text), "refusal": None}
    wanted = order.request.params.logprobs is not None
    choice: Json = {"index": 0, "message": message, "finish_reason": _finish_reason(event)}
    choice["logprobs"] = {"content": logprobs, "refusal": None} if wanted else None
    more: Json = {} if order.request.params.prompt_logprobs is None else {"prompt_logprobs": prompt}
    return answer.body("chat.completion", [choice], usage=_usage(event.usage), **more)


async def _chunks(
    answer: Answer, order: ChatOrder, first: Event, rest: AsyncGenerator[Event, None]
) -> AsyncGenerator[str, None]:
    """The answer in pieces: the role, texts, the reason for the end, and the usage where it was asked for.

    Pieces are JSON already: there is one for each token, so what stands around their texts is written once.
    """
    more: Json = {"usage": None} if order.include_usage else {}

    def chunk(delta: Json, reason: str | None = None, logprobs: list[Json] | None = None) -> str:
        choice: Json = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        if logprobs:
            choice["logprobs"] = {"content": logprobs, "refusal": None}
        return json_text(answer.body("chat.completion.chunk", [choice], **more))

    # Quotes within a JSON string are escaped, so this can only be the field.
    before, after = chunk({"content": ""}).split('"content":""')
    async with aclosing(rest):
        yield chunk({"role": "assistant", "content": ""})
        event = first
        while event.kind != "error":
            logprobs = _logprobs(event)
            if logprobs:
                yield chunk({"content": event.text}, logprobs=logprobs)
            elif event.text:
                yield f'{before}"content":{json_text(event.text)}{after}'
            if event.kind == "done":
                yield chunk({}, _finish_reason(event))
                if order.include_usage:
                    usage = answer.body("chat.completion.chunk", [], usage=_usage(event.usage))
                    yield json_text(usage)
                return
            event = await anext(rest)
        raise api_error(event.error, answer.info.context)


def _finish_reason(event: Event) -> str:
    # "cancelled" is no word of OpenAI's; nobody but us reads the end of an answer that was cancelled.
    return "length" if event.finish_reason == "length" else "stop"


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _logprobs(event: Event) -> list[Json]:
    if event.logprob is None:
        return []
    entry = event.logprob
    pieces = entry.top_pieces or (None,) * len(entry.top)
    top = [_scored(token, score, piece) for (token, score), piece in zip(entry.top, pieces, strict=True)]
    return [_scored(entry.token, entry.logprob, entry.piece) | {"top_logprobs": top}]


def _scored(token: int, logprob: float, piece: bytes | None) -> Json:
    """One token; its text may be part of a character, which only the bytes can tell."""
    if piece is None:
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}
    return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}


def _ranked(entry: TokenLogprob) -> Json:
    """One token of the prompt and the best there, by their ids, as vLLM says it."""
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
    pieces = dict(zip(ranks, entry.top_pieces, strict=False)) | {entry.token: entry.piece}
    scores = {entry.token: entry.logprob} | dict(entry.top)
    return {
        str(token): {
            "logprob": score,
            "rank": ranks.get(token),
            "decoded_token": None if (piece := pieces.get(token)) is None else piece.decode(errors="replace"),
        }
        for token, score in scores.items()
    }
