"""Reading a request for a message: its fields become those of a chat."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from reprlib import repr as short

from hetrun.client.events import ModelInfo
from hetrun.server import request as orders
from hetrun.server import tools as toolschemas
from hetrun.server.anthropic.messages import Json, messages
from hetrun.server.errors import ApiError, wrong_type
from hetrun.server.fields import Body, flag
from hetrun.server.logprobs import Wanted
from hetrun.server.request import Order
from hetrun.server.routes.chat_completions import asked
from hetrun.server.service import Service

SHARED = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "priority",
    "deadline_s",
    "chat_template_kwargs",
)
# Fields of Anthropic's API that don't change answers here, so that even a strict server accepts them.
HINTS = (
    *("metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics", "fallbacks"),
    *("betas", "user_profile_id", "workspace_id", "context_management"),
)
OWN = (
    *("max_tokens", "messages", "system", "stop_sequences", "tools", "tool_choice", "thinking"),
    *("output_config", "output_format"),
)
# Fields that are not supported, each with the reason.
NEVER: Mapping[str, str] = {
    "container": "this server runs no code: give the model a tool that your program runs",
    "mcp_servers": "this server calls no other servers: give the model a tool that your program runs",
}
KNOWN = frozenset((*SHARED, *HINTS, *OWN, *NEVER))
THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Names of fields in the chat's errors, and their names here.
NAMES = (
    (re.compile(r"\bresponse_format\.json_schema"), "output_config.format"),
    (re.compile(r"\bresponse_format"), "output_config.format"),
    (re.compile(r"\bmax_completion_tokens"), "max_tokens"),
    (re.compile(r"^stop\b(?!_)"), "stop_sequences"),
    (re.compile(r"\b(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"\b(tools\[\d+\]|tool_choice)\.function"), r"\1"),
)


@dataclass(frozen=True)
class Asked:
    """A parsed request for a message."""

    order: Order
    shows_thoughts: bool = True  # false: a block of reasoning is sent without its text


def message_request(
    body: Body, info: ModelInfo, service: Service, client: str = "", *, counts: bool = False
) -> Asked:
    """Read a request of this client; ApiError names the field that is wrong. `counts`: only its tokens are
    counted, so it needs no limit."""
    _check(body, service, counts)
    thinking = _object(body, "thinking")
    said = messages(body, keep_billing=service.keep_billing_header)
    with own_names():
        chat = _as_chat(body, thinking, counts)
        # A strict server refuses what Anthropic refuses, which `_check` did; OpenAI has other limits.
        orders.check(chat, info, replace(service, strict=False), (), built=toolschemas.NAMES)
        prompt, how = asked(chat, info, service, Wanted(), said)
        prompt = replace(prompt, progress=chat["stream"] is True)
        order = orders.order(chat, info, client, [prompt], Wanted(), "messages")
        order = orders.bounded(replace(order, reading=how))
    return Asked(order, thinking.get("display") != "omitted")


def asker_fields(body: Body) -> Json:
    """Who asks, as the chat says it."""
    user = _object(body, "metadata").get("user_id")
    return {"user": user}


@contextmanager
def own_names() -> Iterator[None]:
    """Give fields in errors their names of this API."""
    try:
        yield
    except ApiError as error:
        message, param = str(error), str(error.error["param"] or "")
        for chat, ours in NAMES:
            message, param = chat.sub(ours, message), chat.sub(ours, param)
        if message == str(error):
            raise
        code = error.error["code"]
        raise ApiError(message, param, None if code is None else str(code)) from None


def _check(body: Body, service: Service, counts: bool) -> None:
    if not counts and body.get("max_tokens") is None:
        raise ApiError("max_tokens is missing", "max_tokens", "missing_required_parameter")
    for name, why in NEVER.items():
        if body.get(name):
            raise ApiError(f"{name}: {why}", name, "unsupported_parameter")
    if service.strict and (unknown := [name for name in body if name not in KNOWN]):
        name = unknown[0][:80]
        raise ApiError(f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")


def _as_chat(body: Body, thinking: Json, counts: bool) -> Json:
    """The same request in the chat endpoint's format, without its messages."""
    chat: Json = {name: body[name] for name in SHARED if name in body}
    chat["stream"] = flag(body, "stream")
    chat["max_completion_tokens"] = None if counts else body.get("max_tokens")
    chat["stop"] = _stops(body)
    chat["tools"], choice = _tools(body.get("tools")), _object(body, "tool_choice")
    chat["tool_choice"] = _choice(choice) if chat["tools"] else None
    if flag(choice, "disable_parallel_tool_use", "tool_choice."):
        chat["parallel_tool_calls"] = False
    config = _object(body, "output_config")
    chat["response_format"] = _form(config.get("format") or body.get("output_format"))
    effort = config.get("effort")
    if effort is not None and effort not in EFFORTS:
        message = f"output_config.effort must be one of {', '.join(EFFORTS)}, not {short(effort)}"
        raise ApiError(message, "output_config.effort", "invalid_value")
    chat["reasoning_effort"] = None if effort is None else EFFORTS[str(effort)]
    chat["chat_template_kwargs"] = _template_options(body, thinking)
    return chat


def _template_options(body: Body, thinking: Json) -> Json:
    """Reasoning is off unless the client asks for it: many clients take the first block for the answer."""
    given = _object(body, "chat_template_kwargs")
    kind = thinking.get("type", "disabled")
    if kind not in THINKING:
        message = f"thinking.type must be one of {', '.join(THINKING)}, not {short(kind)}"
        raise ApiError(message, "thinking.type", "invalid_value")
    return {"enable_thinking": THINKING[str(kind)], **given}


def _stops(body: Body) -> object:
    given = body.get("stop_sequences")
    if given is None or given == []:
        return None
    if not isinstance(given, list):
        raise wrong_type("stop_sequences", "a list", given)
    return given


def _tools(given: object) -> object:
    if given is None:
        return None
    if not isinstance(given, list):
        raise wrong_type("tools", "a list", given)
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]


def _tool(tool: object, where: str) -> Json:
    if not isinstance(tool, dict):
        raise wrong_type(where, "an object", tool)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        message = (
            f"{where}.type is {short(kind)}, a tool that Anthropic's servers know or run: this server takes "
            "custom tools, which have a name and an input_schema"
        )
        raise ApiError(message, f"{where}.type", "unsupported_value")
    if tool.get("input_schema") is None:
        message = f"{where}.input_schema is missing"
        raise ApiError(message, f"{where}.input_schema", "missing_required_parameter")
    function: Json = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Json) -> object:
    kind = choice.get("type")
    if not choice or kind in CHOICES:
        return CHOICES.get(str(kind))
    if kind != "tool":
        message = f"tool_choice.type must be auto, any, tool or none, not {short(kind)}"
        raise ApiError(message, "tool_choice.type", "invalid_value")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _form(form: object) -> object:
    if form is None:
        return None
    if not isinstance(form, dict):
        raise wrong_type("output_config.format", "an object", form)
    if form.get("type") != "json_schema":
        message = f"output_config.format.type must be json_schema, not {short(form.get('type'))}"
        raise ApiError(message, "output_config.format.type", "invalid_value")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}


def _object(body: Body, name: str) -> Json:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    return value
