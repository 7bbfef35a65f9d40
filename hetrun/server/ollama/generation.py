"""POST /api/chat and /api/generate."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from time import perf_counter
from typing import Any

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.client.events import GenerateRequest, ModelInfo
from hetrun.client.interface import ChatClient
from hetrun.client.model_pool import OnDemand
from hetrun.server import logprobs as scores
from hetrun.server import request as orders
from hetrun.server import tools as toolschemas
from hetrun.server.body import json_object
from hetrun.server.client_id import asker
from hetrun.server.errors import FINAL, ApiError, wrong_type
from hetrun.server.fields import Body, flag
from hetrun.server.json_stream import json_response
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.ollama import output
from hetrun.server.ollama.catalog import Catalog
from hetrun.server.ollama.messages import messages
from hetrun.server.ollama.options import (
    SHARED,
    Json,
    as_chat,
    keep_alive_s,
    own_names,
    refuse_images,
    streams,
    text_of,
    thinking,
)
from hetrun.server.ollama.output import Heading, Lines
from hetrun.server.request import Order
from hetrun.server.response_driver import Events, answered
from hetrun.server.routes.chat_completions import asked
from hetrun.server.routes.models import engines
from hetrun.server.sampling import sampling_params
from hetrun.server.service import Service
from hetrun.text.answers.reading import PLAIN, Reading

# `truncate` and `shift` are accepted: this server neither shortens a conversation nor moves a full context.
COMMON = (
    *("model", "name", "stream", "format", "options", "keep_alive", "think", "truncate", "shift"),
    *SHARED,
)
CHAT = (*COMMON, "messages", "tools")
GENERATE = (*COMMON, "prompt", "suffix", "system", "template", "context", "raw", "images")

Read = Callable[[Body, ModelInfo, Service, str], tuple[GenerateRequest, Reading, str]]
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def routes(service: Service, catalog: Catalog) -> list[Route]:
    def handler(read: Read, fields: Callable[[output.Piecemeal], Json], known: tuple[str, ...]) -> Handler:
        async def answer(request: Request) -> Response:
            began = perf_counter()
            body = await json_object(request)
            name, here = await catalog.find(body)
            asleep = not engines(here.client)
            heading, keep_s = Heading(name, fields, began, asleep), keep_alive_s(body)
            if _asks_nothing(body):
                reason = await load_or_unload(here, keep_s)
                return JSONResponse(heading.alone(reason))
            info = await here.info()
            with own_names():
                orders.check(body, info, here, known, built=toolschemas.NAMES)
                prompt, how, field = read(body, info, here, name)
                order = ordered(body, info, asker(request, body), prompt, how, field)
            keep(here.client, keep_s)

            async def in_one(events: Events) -> Response:
                return await json_response(await output.whole(order, heading, events))

            def stream(events: Events) -> Lines:
                return Lines(output.lines(order, heading, events))

            return await answered(request, here, order, in_one, stream)

        return answer

    crowd = Middleware(Crowd, most_requests=service.most_requests)
    chat, generate = (
        handler(_chat, output.chat_fields, CHAT),
        handler(_generate, output.generated_fields, GENERATE),
    )
    return [
        Route("/api/chat", chat, methods=["POST"], middleware=[crowd]),
        Route("/api/generate", generate, methods=["POST"], middleware=[crowd]),
    ]


def _asks_nothing(body: Body) -> bool:
    """Whether a request only loads or unloads the model."""
    return body.get("messages") in (None, []) and body.get("prompt") in (None, "") and not body.get("suffix")


async def load_or_unload(service: Service, keep_s: float | None) -> str:
    """Do so; returns which it was, in Ollama's words."""
    client = service.client
    if keep_s == 0:
        if isinstance(client, OnDemand):
            await client.rest()
        return "unload"
    keep(client, keep_s)
    if isinstance(client, OnDemand):
        await client.wake()
    else:
        await service.info()
    return "load"


def keep(client: ChatClient, seconds: float | None) -> None:
    """Keep a model loaded for so long after its next request."""
    if seconds is not None and isinstance(client, OnDemand):
        client.keep(None if seconds == math.inf else seconds)


def ordered(
    body: Body, info: ModelInfo, client: str, prompt: GenerateRequest, how: Reading, field: str
) -> Order:
    """The order for this prompt."""
    fields = {"stream": streams(body)} | {name: body.get(name) for name in ("priority", "deadline_s")}
    order = orders.order(fields, info, client, [prompt], _wanted(body), field)
    return orders.bounded(replace(order, reading=how, form="format" if prompt.structure else None))


def _chat(body: Body, info: ModelInfo, service: Service, name: str) -> tuple[GenerateRequest, Reading, str]:
    fields = as_chat(body, info, service) | thinking(body, info, service, name) | {"tools": body.get("tools")}
    prompt, how = asked(fields, info, service, _wanted(body), messages(body))
    return prompt, how, "messages"


def _generate(
    body: Body, info: ModelInfo, service: Service, name: str
) -> tuple[GenerateRequest, Reading, str]:
    refuse_images(body)
    fields, prompt = as_chat(body, info, service), text_of(body, "prompt")
    system, suffix = text_of(body, "system"), text_of(body, "suffix")
    raw = flag(body, "raw")
    _refuse(body, raw)
    if suffix:
        message = "suffix is not supported by this model: it has no marks for a gap that is to be filled"
        raise ApiError(message, "suffix", "not_supported", status=501, headers=FINAL)
    if raw:
        params = sampling_params(fields, info, service.sampling, _wanted(body))
        return GenerateRequest(params, text=prompt), PLAIN, "prompt"
    said = [{"role": "system", "content": system}] if system else []
    said.append({"role": "user", "content": prompt})
    fields |= thinking(body, info, service, name)
    request, how = asked(fields, info, service, _wanted(body), tuple(said))
    return request, how, "prompt"


def _wanted(body: Body) -> scores.Wanted:
    return scores.of_chat({name: body.get(name) for name in ("logprobs", "top_logprobs")})


def _refuse(body: Body, raw: bool) -> None:
    if raw and (body.get("system") or body.get("template") or body.get("context")):
        message = "raw: true sends the prompt as it is: leave out system, template and context"
        raise ApiError(message, "raw", "invalid_value")
    if text_of(body, "template"):
        message = (
            "template: this server uses the model's own template, or that of hetrun serve --chat-template; "
            "raw: true sends a prompt without one"
        )
        raise ApiError(message, "template", "unsupported_parameter")
    context = body.get("context")
    if context is not None and not isinstance(context, list):
        raise wrong_type("context", "a list", context)
    if context:
        message = "context is not kept here: send the conversation as messages to POST /api/chat"
        raise ApiError(message, "context", "unsupported_parameter")
