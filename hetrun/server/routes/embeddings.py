"""POST /v1/embeddings: a vector for each text, the mean of its tokens' hidden states, of length 1."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Literal

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from hetrun.client.events import Event, GenerateRequest, ModelInfo
from hetrun.client.interface import ChatClient
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import DeadlineExceeded, Overloaded
from hetrun.server import fields, request as orders
from hetrun.server.body import json_object
from hetrun.server.client_id import asker
from hetrun.server.disconnect import unless_gone
from hetrun.server.errors import ApiError, api_error
from hetrun.server.inputs import Field, Text, texts
from hetrun.server.json_stream import json_text
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.response_driver import LATE_S
from hetrun.server.routes.models import meant
from hetrun.server.service import Service

if TYPE_CHECKING:  # numpy comes with it
    from hetrun.graph.pooling import Pooling

# Texts of one request in the engine at a time: enough to fill its passes without filling its queue.
TOGETHER = 32
INPUT = Field("input", "text", "make a vector of", 2048, blank=False)  # as at OpenAI
READ = (
    *("model", INPUT.name, "encoding_format", "dimensions"),
    *("user", "safety_identifier", "priority", "deadline_s"),
)
KNOWN = (*READ, *fields.HINTS, *fields.NEVER)
FORMATS = ("float", "base64")


def routes(service: Service) -> list[Route]:
    async def embed(request: Request) -> Response:
        body = await json_object(request)
        here = await meant(body, service)
        info = await here.info()
        orders.check(body, info, here, KNOWN)
        asked = embedding_order(body, info, asker(request, body))
        ended = await unless_gone(request.receive, in_time(here.client, asked))
        # Text by text, so that other requests get turns while a long answer is written.
        return StreamingResponse(_written(asked, ended), media_type="application/json")

    crowd = Middleware(Crowd, most_requests=service.most_requests)
    paths = ("/v1/embeddings", "/embeddings")
    return [Route(path, embed, methods=["POST"], middleware=[crowd]) for path in paths]


@dataclass(frozen=True)
class EmbeddingOrder:
    """A request for vectors."""

    info: ModelInfo
    texts: Sequence[GenerateRequest]
    base64: bool
    dimensions: int
    field: str = INPUT.name  # that the texts came in, for errors


def embedding_order(body: fields.Body, info: ModelInfo, client: str) -> EmbeddingOrder:
    """Read a request of this client; raises an ApiError that names a wrong field."""
    asked = pooled(body, client, info.pooling)
    found = [_of(asked, text) for text in texts(body, info, INPUT)]
    form = body.get("encoding_format")
    if form is not None and form not in FORMATS:
        message = f"encoding_format must be one of {', '.join(FORMATS)}"
        raise ApiError(message, "encoding_format", "invalid_value")
    if not info.width:
        raise ApiError("Embeddings are not available for this model: it runs through libllama", "model")
    dimensions = fields.count(body, "dimensions", 1, info.width) or info.width
    return EmbeddingOrder(info, found, form == "base64", dimensions)


def pooled(body: fields.Body, client: str, pooling: Pooling | Literal["rank"]) -> GenerateRequest:
    """What the requests to the engine share, for texts of which a vector or a score is wanted."""
    return GenerateRequest(
        SamplingParams(),
        text="",
        client=client,
        priority=fields.priority(body),
        deadline_s=fields.deadline_s(body),
        whole=True,
        pooling=pooling,
    )


def _of(asked: GenerateRequest, text: Text) -> GenerateRequest:
    return replace(asked, text=text) if isinstance(text, str) else replace(asked, text=None, tokens=text)


async def in_time(client: ChatClient, asked: EmbeddingOrder) -> list[Event]:
    """Wait for a result. The engine watches deadlines itself, except during a restart."""
    deadline_s = asked.texts[0].deadline_s
    try:
        async with asyncio.timeout(None if deadline_s is None else deadline_s + LATE_S):
            return await _all(client, asked)
    except TimeoutError:
        late = DeadlineExceeded(f"the engine did not respond within {deadline_s:g} s (deadline_s)")
        raise api_error(late) from None


async def _all(client: ChatClient, asked: EmbeddingOrder) -> list[Event]:
    """The last events of all texts; the first error ends the others."""
    found: dict[int, Event] = {}
    left = deque(enumerate(asked.texts))
    at_work, began = min(len(left), TOGETHER), monotonic()

    async def work() -> None:
        nonlocal at_work
        try:
            while left:
                i, text = left.popleft()
                event = await _one(client, text, monotonic() - began)
                if isinstance(event.error, Overloaded) and at_work > 1:
                    left.appendleft((i, text))  # let the others continue, so the work so far is not lost
                    return
                if event.kind == "error":
                    raise api_error(event.error, asked.info.context, asked.field)
                found[i] = event
        finally:
            at_work -= 1

    workers = [asyncio.create_task(work()) for _ in range(at_work)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [found[i] for i in range(len(asked.texts))]


async def _one(client: ChatClient, text: GenerateRequest, waited_s: float) -> Event:
    if text.deadline_s is not None:
        text = replace(text, deadline_s=text.deadline_s - waited_s)
    async with aclosing(client.stream(text)) as events:
        async for event in events:
            if event.last:
                return event
    raise AssertionError("a request ends with its last event")


async def _written(asked: EmbeddingOrder, ended: Sequence[Event]) -> AsyncIterator[str]:
    """The answer as JSON."""
    yield '{"object":"list","data":['
    for i, event in enumerate(ended):
        assert event.embedding is not None, "it ended without an error"
        comma = "," if i else ""
        yield f'{comma}{{"object":"embedding","index":{i},"embedding":{vector_text(event.embedding, asked)}}}'
        await asyncio.sleep(0)
    tokens = sum(event.usage.prompt_tokens for event in ended)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    yield f'],"model":{json_text(asked.info.id)},"usage":{json_text(usage)}}}'


def vector_text(stored: bytes, asked: EmbeddingOrder) -> str:
    """The first numbers of a vector, normalised to length 1; zeros stay zeros."""
    numbers = unpacked(stored)[: asked.dimensions]
    length = math.hypot(*numbers) or 1.0
    numbers = tuple(x / length for x in numbers)
    if asked.base64:
        return f'"{base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()}"'
    return numbers_text(numbers)


def unpacked(stored: bytes) -> tuple[float, ...]:
    """The numbers of a vector as the engine stores them."""
    return struct.unpack(f"<{len(stored) // 4}f", stored)


def numbers_text(numbers: Sequence[float]) -> str:
    """A list of float32 as JSON."""
    # As many digits as needed to read the same float32.
    return f"[{','.join([f'{x:.9g}' for x in numbers])}]"
