"""POST /api/chat and /api/generate."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.client.events import PICTURE_MARK, GenerateRequest, Message, ModelInfo
from hetrun.client.interface import ChatClient
from hetrun.client.model_pool import OnDemand
from hetrun.client.sampling_params import SamplingParams
from hetrun.server import request as orders
from hetrun.server.body import json_object
from hetrun.server.chat import TOOLS, chat_request
from hetrun.server.client_id import asker
from hetrun.server.errors import ApiError, renamed, wrong_type
from hetrun.server.fields import Body, LogprobCount, flag, wanted_of_chat
from hetrun.server.infill import fill_gaps
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.ollama.catalog import Catalog
from hetrun.server.ollama.messages import images_of, messages, with_images
from hetrun.server.ollama.options import (
    NAMES,
    SHARED,
    Json,
    as_chat,
    keep_alive_s,
    streams,
    text_of,
    thinking,
)
from hetrun.server.ollama.output import (
    AnswerHeader,
    OllamaWriter,
    PartialAnswer,
    chat_fields,
    generated_fields,
)
from hetrun.server.pictures.parts import Part, taken_out, without_mark
from hetrun.server.request import Order
from hetrun.server.response_driver import respond
from hetrun.server.routes.models import engines
from hetrun.server.sampling import sampling_params
from hetrun.server.service import Service
from hetrun.text.answers.reading import PLAIN, AnswerFormat

IMAGE_MARK = re.compile(r"\[img-(\d{1,3})\]")

Read = Callable[[Body, ModelInfo, Service, str], tuple[GenerateRequest, AnswerFormat]]


@dataclass(frozen=True)
class GenerationEndpoint:
    """What differs between the two."""

    read: Read  # the engine's request, and the parsers of its answer
    field: str  # the prompt
    fields: Callable[[PartialAnswer], Json]  # of an answer
    known: tuple[str, ...]


def routes(service: Service, catalog: Catalog) -> list[Route]:
    crowd = Middleware(Crowd, most_requests=service.most_requests)

    def route(path: str, endpoint: GenerationEndpoint) -> Route:
        async def answer(request: Request) -> Response:
            return await _answer(request, endpoint, catalog)

        return Route(path, answer, methods=["POST"], middleware=[crowd])

    return [route("/api/chat", CHAT), route("/api/generate", GENERATE)]


async def _answer(request: Request, endpoint: GenerationEndpoint, catalog: Catalog) -> Response:
    began = perf_counter()
    body = await json_object(request)
    name, here = await catalog.find(body)
    heading = AnswerHeader(name, endpoint.fields, began, asleep=not engines(here.client))
    keep_s = keep_alive_s(body)
    if _asks_nothing(body):
        return JSONResponse(heading.alone(await load_or_unload(here, keep_s)))
    order = await _order(body, endpoint, here, name, asker(request, body))
    keep(here.client, keep_s)

    writer = partial(OllamaWriter, heading=heading)
    return await respond(request, here, order, whole=writer, stream=writer)


async def _order(body: Body, endpoint: GenerationEndpoint, service: Service, name: str, client: str) -> Order:
    info = await service.info()
    with renamed(NAMES):
        orders.check(body, info, service, endpoint.known, built=TOOLS)
        prompt, how = endpoint.read(body, info, service, name)
        fields = {"stream": streams(body)} | {name: body.get(name) for name in ("priority", "deadline_s")}
        order = orders.order(
            fields, info, client, [prompt], wanted=_wanted(body), field=endpoint.field, reading=how
        )
        order = replace(order, form="format" if prompt.structure else None)
    if endpoint is GENERATE and (suffix := text_of(body, "suffix")):
        order = await fill_gaps(order, suffix, service)
    return orders.bounded(order)


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


def _chat(body: Body, info: ModelInfo, service: Service, name: str) -> tuple[GenerateRequest, AnswerFormat]:
    fields = as_chat(body, info, service) | thinking(body, info, service, name) | {"tools": body.get("tools")}
    return chat_request(fields, info, service, _wanted(body), messages(body))


def _generate(
    body: Body, info: ModelInfo, service: Service, name: str
) -> tuple[GenerateRequest, AnswerFormat]:
    images = images_of(body)
    fields, prompt = as_chat(body, info, service), text_of(body, "prompt")
    system, suffix = text_of(body, "system"), text_of(body, "suffix")
    raw = flag(body, "raw")
    _refuse(body, raw)
    if raw or suffix:  # neither goes through the template
        params = sampling_params(fields, info, service.sampling, _wanted(body))
        return _raw(params, prompt, images, info), PLAIN
    said: list[Message] = [{"role": "system", "content": system}] if system else []
    said.append(with_images({"role": "user", "content": prompt}, images))
    fields |= thinking(body, info, service, name)
    return chat_request(fields, info, service, _wanted(body), tuple(said))


def _raw(params: SamplingParams, prompt: str, images: list[Part], info: ModelInfo) -> GenerateRequest:
    """A prompt without a template; a picture is where it has [img-0], or before it, as in Ollama."""
    (_,), files = taken_out([{"content": list(images)}], info)
    marks = [f"[img-{i}]" for i in range(len(files))]
    missing = "".join(mark for mark in marks if mark not in prompt)
    pieces, order = without_mark(missing + prompt, "prompt", files), []
    for match in IMAGE_MARK.finditer(pieces):
        number = int(match[1])
        if number < len(files) and number not in order:
            order.append(number)
    for mark in marks:
        pieces = pieces.replace(mark, PICTURE_MARK, 1)
    return GenerateRequest(params, text=pieces, pictures=tuple(files[i] for i in order))


def _wanted(body: Body) -> LogprobCount:
    return wanted_of_chat({name: body.get(name) for name in ("logprobs", "top_logprobs")})


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


# `truncate` and `shift` are accepted: this server neither shortens a conversation nor moves a full context.
COMMON = (
    *("model", "name", "stream", "format", "options", "keep_alive", "think", "truncate", "shift"),
    *SHARED,
)
CHAT = GenerationEndpoint(_chat, "messages", chat_fields, (*COMMON, "messages", "tools"))
GENERATE = GenerationEndpoint(
    _generate,
    "prompt",
    generated_fields,
    (*COMMON, "prompt", "suffix", "system", "template", "context", "raw", "images"),
)
