"""POST /api/embed, and the older /api/embeddings for a single text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from time import perf_counter

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hetrun.client.events import Event, ModelInfo
from hetrun.client.queries import Tokenize
from hetrun.server import request as orders
from hetrun.server.body import json_object
from hetrun.server.client_id import asker
from hetrun.server.disconnect import unless_gone
from hetrun.server.errors import wrong_type
from hetrun.server.fields import Body, flag, object_of
from hetrun.server.json_stream import json_text
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.ollama.catalog import Catalog
from hetrun.server.ollama.generation import keep, load_or_unload
from hetrun.server.ollama.options import (
    Json,
    check_options,
    dimensions,
    keep_alive_s,
    text_of,
)
from hetrun.server.query import asked
from hetrun.server.routes.embeddings import (
    EmbeddingOrder,
    embedding_order,
    in_time,
    numbers_text,
    unpacked,
    vector_text,
)
from hetrun.server.service import Service

COMMON = ("model", "name", "options", "keep_alive", "priority", "deadline_s", "user")
EMBED = (*COMMON, "input", "truncate", "dimensions")
EMBEDDINGS = (*COMMON, "prompt")
MORE = ("priority", "deadline_s", "user")


def routes(service: Service, catalog: Catalog) -> list[Route]:
    async def vectors(
        request: Request, body: Body, known: Sequence[str], given: str | list[str]
    ) -> tuple[str, EmbeddingOrder, list[Event]] | None:
        """The answers' name, order and events; None if the request only loads or unloads the model."""
        name, here = await catalog.find(body)
        keep_s = keep_alive_s(body)
        check_options(object_of(body, "options"), service)
        if not given:
            await load_or_unload(here, keep_s)
            return None
        info = await here.info()
        orders.check(body, info, here, known)
        shortened = (
            [await _fitting(text, info, here) for text in _as_list(given)] if _shortens(body) else given
        )
        read: Json = {"input": shortened, "dimensions": dimensions(body, info.width)}
        order = embedding_order(read | {name: body.get(name) for name in MORE}, info, asker(request, body))
        keep(here.client, keep_s)
        return name, order, await unless_gone(request.receive, in_time(here.client, order))

    async def embed(request: Request) -> Response:
        began = perf_counter()
        body = await json_object(request)
        found = await vectors(request, body, EMBED, _input(body))
        if found is None:
            return JSONResponse({"model": (await catalog.find(body))[0], "embeddings": []})
        name, order, ended = found
        tokens = sum(event.usage.prompt_tokens for event in ended)
        more: Json = {"model": name, "total_duration": int((perf_counter() - began) * 1e9)}
        more |= {"load_duration": 0, "prompt_eval_count": tokens}
        return StreamingResponse(_written(order, ended, more), media_type="application/json")

    async def embeddings(request: Request) -> Response:
        body = await json_object(request)
        found = await vectors(request, body, EMBEDDINGS, text_of(body, "prompt"))
        if found is None:
            return JSONResponse({"embedding": []})
        stored = found[2][0].embedding
        assert stored is not None, "it ended without an error"
        text = f'{{"embedding":{numbers_text(unpacked(stored))}}}'
        return Response(text, media_type="application/json")

    crowd = Middleware(Crowd, most_requests=service.most_requests)
    return [
        Route("/api/embed", embed, methods=["POST"], middleware=[crowd]),
        Route("/api/embeddings", embeddings, methods=["POST"], middleware=[crowd]),
    ]


def _input(body: Body) -> str | list[str]:
    """A text or several; empty if there is none."""
    value = body.get("input")
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type("input", "a text or a list of texts", value)
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise wrong_type(f"input[{i}]", "a text", text)
    return value


def _as_list(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _shortens(body: Body) -> bool:
    """Whether texts that are too long are cut off, as they are unless the client says otherwise."""
    return body.get("truncate") is None or flag(body, "truncate")


async def _fitting(text: str, info: ModelInfo, service: Service) -> str | list[int]:
    """The text, or as many of its tokens as the context has room for."""
    if len(text.encode(errors="replace")) < info.context:  # a token has at least a byte; one begins the text
        return text
    tokens = await asked(service, Tokenize(text))
    return tokens[: info.context] if len(tokens) > info.context else text


async def _written(order: EmbeddingOrder, ended: Sequence[Event], more: Json) -> AsyncIterator[str]:
    """The answer as JSON, text by text, so that other requests get turns."""
    yield f'{json_text(more)[:-1]},"embeddings":['
    for i, event in enumerate(ended):
        assert event.embedding is not None, "it ended without an error"
        yield f"{',' if i else ''}{vector_text(event.embedding, order)}"
        await asyncio.sleep(0)
    yield "]}"
