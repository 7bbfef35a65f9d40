"""/v1/responses: OpenAI's newer endpoint, which can store conversations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from time import time

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.client.events import Message as Said, ModelInfo
from hetrun.errors import OptionError
from hetrun.server import request as orders, sampling
from hetrun.server.body import json_object
from hetrun.server.chat import NONE_LOADED, TOOLS, chat_request
from hetrun.server.client_id import asker, owner
from hetrun.server.errors import ApiError, renamed, wrong_type
from hetrun.server.fields import MOST_TOP, Body, LogprobCount, count, flag, object_of
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.pictures.parts import Loaded
from hetrun.server.query import counted, few
from hetrun.server.request import Order
from hetrun.server.response_driver import Json, respond
from hetrun.server.responses import input
from hetrun.server.responses.items import new_id
from hetrun.server.responses.output import Head, Keep, ResponseWriter
from hetrun.server.responses.store import Archive, StoredResponse, turn
from hetrun.server.routes.models import meant
from hetrun.server.service import Service
from hetrun.text.chat.messages import plain

OWN = (
    *("input", "instructions", "max_output_tokens", "text", "reasoning", "previous_response_id"),
    *("truncation", "include", "top_logprobs", "max_tool_calls", "chat_template_kwargs"),
)
# Fields of the chat, with their names here.
MOVED: Mapping[str, str] = {
    "messages": "input",
    **dict.fromkeys(sampling.LIMITS, "max_output_tokens"),
    "response_format": "text.format",
    "logprobs": 'include: ["message.output_text.logprobs"]',
    "reasoning_effort": "reasoning.effort",
}
# Unsupported fields, with what to do instead.
NEVER: Mapping[str, str] = {
    "background": "this server answers while the client waits; use stream: true",
    "conversation": "this server keeps no conversations; use previous_response_id",
    "prompt": "this server keeps no prompts; send instructions and input",
    "context_management": "this server shortens no conversations; send what still matters as input",
}
CHAT_NAMES = ("max_completion_tokens", "response_format", "reasoning_effort")  # in the chat
KNOWN = tuple({*orders.COMMON, *OWN, *NEVER} - {*MOVED, "n"} | {*CHAT_NAMES})
# Names of fields in the chat's errors, and their names here.
NAMES = (
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^max_completion_tokens"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort"), "reasoning.effort"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function"), r"\1"),
)
LOGPROBS = "message.output_text.logprobs"
# Other values of `include` concern things that never occur here.
INCLUDES = (
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url"),
    *("code_interpreter_call.outputs", "reasoning.encrypted_content", LOGPROBS),
)
# OpenAI's limits.
MOST_PAIRS, MOST_KEY, MOST_VALUE = 16, 64, 512


def routes(service: Service) -> list[Route]:
    archive = Archive()

    async def read(request: Request) -> tuple[Service, Order, Head, Keep]:
        body, mine = await json_object(request), owner(request)
        before = previous(body, archive, mine)
        here = await meant(body, service)
        loaded, info = await service.pictures.loaded(body), await here.info()
        order, head, said = response_order(body, info, here, before, asker(request, body), loaded)

        def keep(text: bytes, answer: Said) -> None:
            if head.fields["store"]:
                turns = (*(before.turns if before else ()), turn([*said, answer]))
                archive.keep(str(head.fields["id"]), StoredResponse(mine, text, turns))

        return here, order, head, keep

    async def create(request: Request) -> Response:
        here, order, head, keep = await read(request)
        writer = partial(ResponseWriter, head=head, keep=keep)
        return await respond(request, here, order, whole=writer, stream=writer)

    async def tokens(request: Request) -> Response:
        here, order, _, _ = await read(request)
        with renamed(NAMES):
            return await counted(here, order.prompts[0])

    async def one(request: Request) -> Response:
        name = request.path_params["name"]
        if request.query_params.get("stream", "false") != "false":
            message = "a response that is complete cannot be streamed: ask for it without stream"
            raise ApiError(message, "stream", "unsupported_parameter")
        kept = archive.find(owner(request), name)
        if kept is None:
            raise _unknown(name, "response_id", "response_not_found", 404)
        return Response(kept.body, media_type="application/json")

    async def drop(request: Request) -> Response:
        name = request.path_params["name"]
        if not archive.drop(owner(request), name):
            raise _unknown(name, "response_id", "response_not_found", 404)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def stored(request: Request) -> Response:
        # One route, so that the Allow header of a refusal names both methods.
        return await (drop if request.method == "DELETE" else one)(request)

    crowd = Middleware(Crowd, most_requests=service.most_requests)
    return [
        route
        for path in ("/v1/responses", "/responses")
        for route in (
            Route(path, create, methods=["POST"], middleware=[crowd]),
            Route(f"{path}/input_tokens", tokens, methods=["POST"], middleware=few()),
            Route(f"{path}/{{name}}", stored, methods=["GET", "DELETE"]),
        )
    ]


def previous(body: Body, archive: Archive, mine: str) -> StoredResponse | None:
    """The response that a request continues."""
    name = _text(body, "previous_response_id")
    if name is None:
        return None
    kept = archive.find(mine, name)
    if kept is None:
        raise _unknown(name, "previous_response_id", "previous_response_not_found", 400)
    return kept


def _unknown(name: str, param: str, code: str, status: int) -> ApiError:
    message = (
        f"Response with id '{name[:80]}' not found: this server keeps those that were used last, in "
        "memory, until it ends; send the whole conversation as input"
    )
    return ApiError(message, param, code, status=status)


def response_order(
    body: Body,
    info: ModelInfo,
    service: Service,
    before: StoredResponse | None = None,
    client: str = "",
    loaded: Loaded = NONE_LOADED,
) -> tuple[Order, Head, list[Said]]:
    """Read a request of this client: the order, the answer's fields, and the new messages; ApiError names the
    field that is wrong."""
    _refuse(body)
    wanted, instructions = _wanted(body), _text(body, "instructions")
    if body.get("input") is None and before is None:
        raise ApiError("input is missing", "input", "missing_required_parameter")
    said = [] if body.get("input") is None else input.messages(body["input"], loaded)
    history = [] if before is None else list(before.messages())
    with renamed(NAMES):
        chat = _as_chat(body)
        orders.check(chat, info, service, KNOWN, built=TOOLS)
        messages = input.with_instructions(instructions, [*history, *said])
        # An answer is a new message here, also where the conversation ends with one.
        prompt, how = chat_request(chat, info, service, wanted, messages, resumes=False)
        order = orders.order(
            chat, info, client, [prompt], wanted=wanted, field=input.FIELD, reading=how, names=NAMES
        )
        order = orders.bounded(order)
    store = body.get("store") is None or flag(body, "store")
    return order, _head(body, chat, order, store), said


def _refuse(body: Body) -> None:
    for name, ours in MOVED.items():
        if body.get(name) is not None:
            raise ApiError(
                f"{name} is not a parameter of responses; use {ours}", name, "unsupported_parameter"
            )
    for name, why in NEVER.items():
        if body.get(name):
            raise ApiError(f"{name}: {why}", name, "unsupported_parameter")
    if body.get("n") not in (None, 1):
        raise ApiError(
            "n must be 1: a response has one answer; send several requests", "n", "unsupported_parameter"
        )
    match body.get("truncation"):
        case None | "disabled":
            pass
        case "auto":
            message = "truncation must be disabled: this server never drops input"
            raise ApiError(message, "truncation", "unsupported_parameter")
        case _:
            raise ApiError("truncation must be disabled", "truncation", "invalid_value")


def _as_chat(body: Body) -> Json:
    """The same request in the chat endpoint's format."""
    chat = {name: value for name, value in body.items() if name not in ("text", "max_output_tokens")}
    chat["max_completion_tokens"] = body.get("max_output_tokens")
    chat["reasoning_effort"] = object_of(body, "reasoning").get("effort")
    form = object_of(body, "text").get("format")
    try:
        plain("text.format", form)  # the answer repeats it, so it must not be nested too deeply
    except OptionError as error:
        raise ApiError(str(error), "text.format", "invalid_value") from None
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    tools = body.get("tools")
    tools = [_nested(tool) for tool in tools] if isinstance(tools, list) else tools
    return chat | {"response_format": form, "tools": tools, "tool_choice": _nested(body.get("tool_choice"))}


def _nested(named: object) -> object:
    """A function in the chat's format, nested in an object."""
    if not isinstance(named, dict) or named.get("type") != "function" or "function" in named:
        return named
    return {"type": "function", "function": {name: named[name] for name in named if name != "type"}}


def _flat(named: object) -> object:
    """A function in the format of responses."""
    if not isinstance(named, dict) or not isinstance(function := named.get("function"), dict):
        return named
    return {"type": "function"} | function


def _wanted(body: Body) -> LogprobCount:
    """The requested log-probabilities, by `include` or `top_logprobs`."""
    include = body.get("include")
    if include is None:
        include = []
    if not isinstance(include, list):
        raise wrong_type("include", "a list", include)
    for i, name in enumerate(include):
        if name not in INCLUDES:
            message = f"include[{i}] must be one of {', '.join(INCLUDES)}"
            raise ApiError(message, f"include[{i}]", "invalid_value")
    top = count(body, "top_logprobs", 0, MOST_TOP) or 0
    return LogprobCount(top if top or LOGPROBS in include else None)


def _head(body: Body, chat: Body, order: Order, store: bool) -> Head:
    """The fields that an answer repeats from its request, and its own."""
    params, text, reasoning = order.params, object_of(body, "text"), object_of(body, "reasoning")
    form = text.get("format") or {"type": "text"}
    tools, named = chat["tools"], order.reading.tools.named
    return Head(
        {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": _text(body, "instructions"),
            "max_output_tokens": params.max_tokens,
            "max_tool_calls": count(body, "max_tool_calls", 1, 2**31 - 1),
            "metadata": _metadata(body),
            "model": order.info.id,
            "parallel_tool_calls": body.get("parallel_tool_calls") is None
            or flag(body, "parallel_tool_calls"),
            "previous_response_id": _text(body, "previous_response_id"),
            "prompt_cache_key": _text(body, "prompt_cache_key"),
            "reasoning": {name: _text(reasoning, name, "reasoning.") for name in ("effort", "summary")},
            "safety_identifier": _text(body, "safety_identifier"),
            "service_tier": "default",
            "store": store,
            "temperature": params.temperature,
            "text": {"format": form, "verbosity": _text(text, "verbosity", "text.") or "medium"},
            "tool_choice": {"type": "function", "name": named}
            if named
            else body.get("tool_choice") or "auto",
            "tools": [_flat(tool) for tool in tools] if isinstance(tools, list) else [],
            "top_logprobs": order.wanted.answer or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": _text(body, "user"),
        }
    )


def _metadata(body: Body) -> Mapping[str, object]:
    pairs = object_of(body, "metadata")
    if len(pairs) > MOST_PAIRS:
        message = f"metadata may have {MOST_PAIRS} pairs, not {len(pairs)}"
        raise ApiError(message, "metadata", "object_above_max_properties")
    for key, value in pairs.items():
        where = f"metadata.{key[:MOST_KEY]}"
        if not isinstance(value, str):
            raise wrong_type(where, "a string", value)
        if len(key) > MOST_KEY or len(value) > MOST_VALUE:
            message = f"{where}: a key may have {MOST_KEY} characters, and a value {MOST_VALUE}"
            raise ApiError(message, where, "string_above_max_length")
    return pairs


def _text(body: Body, name: str, prefix: str = "") -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong_type(prefix + name, "a string", value)
    return value
