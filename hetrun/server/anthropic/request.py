"""The fields of a request, converted to those of a chat."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from reprlib import repr as short

from hetrun.client import sampler_plugins
from hetrun.client.events import ModelInfo
from hetrun.errors import OptionError
from hetrun.server import request as orders, sampling
from hetrun.server.anthropic.input import conversation
from hetrun.server.chat import NONE_LOADED, chat_request
from hetrun.server.errors import ApiError, renamed, wrong_type
from hetrun.server.fields import Body, LogprobCount, flag, object_of
from hetrun.server.pictures.parts import Loaded
from hetrun.server.request import Order
from hetrun.server.service import Service
from hetrun.text.chat.messages import plain

Json = dict[str, object]

# What the chat has under the same name.
SHARED = (
    "model",
    "stream",
    "priority",
    "deadline_s",
    "chat_template_kwargs",
    "json_schema",
    "regex",
    "grammar",
)
# Fields of other APIs, with their names here: ignoring them would silently give another answer.
MOVED: Mapping[str, str] = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
OWN = (
    *("max_tokens", "messages", "system", "metadata", "output_config", "output_format", "stop_sequences"),
    *("thinking", "tool_choice", "tools"),
)
# They don't change answers here, so that even a strict server accepts them. Contexts are never edited, and
# every prompt is cached.
HINTS = (
    *("cache_control", "context_management", "diagnostics", "inference_geo", "service_tier", "speed"),
    *("user_profile_id", "workspace_id", "betas", "fallback_credit_token", "fallbacks"),
)
# Unsupported fields, with the reason.
NEVER: Mapping[str, str] = {
    "container": "this server runs no code; leave it out",
    "mcp_servers": "this server calls no other servers; give their tools as tools",
}
SAMPLING = tuple(name for name in sampling.SAMPLING if name not in MOVED)
KNOWN = (*SHARED, *SAMPLING, *OWN, *HINTS, *NEVER)
COUNTED = tuple(name for name in KNOWN if name != "max_tokens")  # in a request to count tokens
# Names of fields in the chat's errors, and their names here.
NAMES = (
    (re.compile(r"^response_format(\.json_schema(\.schema)?)?"), "output_config.format"),
    (re.compile(r"^reasoning_effort"), "output_config.effort"),
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function"), r"\1"),
)
STRICT_TEMPERATURE = 1.0
STRICT_BUDGET = 1024  # the least `budget_tokens`
# Models know the names of OpenAI's API, which has fewer.
EFFORTS: Mapping[str, str] = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
THINKING: Mapping[str, bool] = {"enabled": True, "adaptive": True, "disabled": False, "between_tools": False}
DISPLAYS = (None, "summarized", "omitted")
CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
NOT_THINKING: Json = {"type": "disabled"}


def message_order(
    body: Body,
    info: ModelInfo,
    service: Service,
    client: str,
    loaded: Loaded = NONE_LOADED,
    *,
    counted: bool = False,
    beta: bool = False,
) -> Order:
    """Read a request; ApiError names the field that is wrong. `counted`: only its tokens are wanted; `beta`:
    its client uses features that this server may not know."""
    _refuse(body, service.strict and not beta)
    if service.strict:
        _check_strictly(body)
    limit = 1 if counted else _max_tokens(body)
    said = conversation(body, loaded, keep_billing_header=service.keep_billing_header)
    with renamed(NAMES):
        chat = _as_chat(body, max(limit, 1))
        wanted = LogprobCount(None)
        prompt, how = chat_request(chat, info, service, wanted, said)
        order = orders.order(
            chat, info, client, [prompt], wanted=wanted, field="messages", reading=how, names=NAMES
        )
    (prompt,) = order.prompts
    prompt = replace(prompt, prompt_only=limit == 0, progress=order.stream)
    return replace(order, prompts=(prompt,))


def omits_thoughts(body: Body) -> bool:
    """Whether the answer has no reasoning, only a signature that carries it."""
    return _thinking(body).get("display") == "omitted"


def user_of(body: Body) -> Json:
    """The user that a request names, as the chat has it."""
    return {"user": object_of(body, "metadata").get("user_id")}


def _refuse(body: Body, strict: bool) -> None:
    for name, ours in MOVED.items():
        if body.get(name) is not None:
            message = f"{name} is not a parameter of messages; use {ours}"
            raise ApiError(message, name, "unsupported_parameter")
    for name, why in NEVER.items():
        if body.get(name):
            raise ApiError(f"{name}: {why}", name, "unsupported_parameter")
    for name in body if strict else ():
        if name not in KNOWN and name not in sampler_plugins.parameters():
            raise ApiError(f"{name}: Extra inputs are not permitted", name, "unknown_parameter")


def _check_strictly(body: Body) -> None:
    """Anthropic's own limits."""
    heat, budget = body.get("temperature"), _thinking(body).get("budget_tokens")
    if isinstance(heat, int | float) and heat > STRICT_TEMPERATURE:
        raise ApiError(f"temperature must be {STRICT_TEMPERATURE:g} or less", "temperature", "invalid_value")
    if isinstance(budget, int) and budget < STRICT_BUDGET:
        field = "thinking.budget_tokens"
        raise ApiError(f"{field} must be {STRICT_BUDGET} or more", field, "invalid_value")
    if "model" not in body:
        raise ApiError("model is missing", "model", "missing_required_parameter")


def _max_tokens(body: Body) -> int:
    limit = body.get("max_tokens")
    if limit is None:
        raise ApiError("max_tokens is missing", "max_tokens", "missing_required_parameter")
    if type(limit) is not int or limit < 0:
        message = f"max_tokens must be an integer, 0 or more, not {short(limit)}"
        raise ApiError(message, "max_tokens", "invalid_value")
    if limit == 0 and flag(body, "stream"):
        message = "max_tokens must be 1 or more with stream: true"
        raise ApiError(message, "max_tokens", "invalid_value")
    return limit


def _as_chat(body: Body, limit: int) -> Json:
    """The same request in the chat endpoint's format, without messages."""
    names = (*SHARED, *SAMPLING, *sampler_plugins.parameters())
    chat: Json = {name: body[name] for name in names if body.get(name) is not None}
    output = object_of(body, "output_config")
    choice, parallel = _tool_choice(body.get("tool_choice"))
    chat |= {
        "max_tokens": limit,
        "stop": body.get("stop_sequences") or None,
        "tools": _tools(body.get("tools")),
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "response_format": _form(output.get("format") or body.get("output_format")),
        "reasoning_effort": _effort(output.get("effort")),
        "chat_template_kwargs": _template_options(body),
    }
    return chat


def _template_options(body: Body) -> Json:
    """Reasoning is on or off, where the template knows both; off if the request says nothing, since clients
    that don't ask for thinking blocks don't expect them."""
    own = object_of(body, "chat_template_kwargs")
    return {"enable_thinking": THINKING[str(_thinking(body)["type"])], **own}


def _thinking(body: Body) -> Json:
    """The field, checked; `budget_tokens` is not enforced, because templates have no budgets."""
    thinking = object_of(body, "thinking") or NOT_THINKING
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if not isinstance(kind, str) or kind not in THINKING:
        message = f"thinking.type must be {', '.join(THINKING)}, not {short(kind)}"
        raise ApiError(message, "thinking.type", "invalid_value")
    if budget is not None and (type(budget) is not int or budget < 1):
        message = f"thinking.budget_tokens must be an integer, 1 or more, not {short(budget)}"
        raise ApiError(message, "thinking.budget_tokens", "invalid_value")
    if thinking.get("display") not in DISPLAYS:
        message = "thinking.display must be summarized or omitted"
        raise ApiError(message, "thinking.display", "invalid_value")
    return thinking


def _effort(effort: object) -> str | None:
    if effort is None:
        return None
    if not isinstance(effort, str) or effort not in EFFORTS:
        message = f"output_config.effort must be {', '.join(EFFORTS)}, not {short(effort)}"
        raise ApiError(message, "output_config.effort", "invalid_value")
    return EFFORTS[effort]


def _form(form: object) -> Json | None:
    """The answer's format as the chat has it."""
    if form is None:
        return None
    where = "output_config.format"
    if not isinstance(form, dict):
        raise wrong_type(where, "an object", form)
    if form.get("type") != "json_schema":
        message = f"{where}.type must be json_schema, not {short(form.get('type'))}"
        raise ApiError(message, f"{where}.type", "invalid_value")
    if form.get("schema") is None:
        raise ApiError(f"{where}.schema is missing", f"{where}.schema", "missing_required_parameter")
    try:
        plain(where, form)
    except OptionError as error:
        raise ApiError(str(error), where, "invalid_value") from None
    return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}


def _tools(tools: object) -> object:
    if not isinstance(tools, list):
        return tools
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: object, where: str) -> object:
    """A tool as the chat has it."""
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    if kind not in (None, "custom"):
        message = (
            f"{where}.type is {short(kind)}, a tool that Anthropic defines: this server has no tools of its "
            "own; leave it out, or describe it as a custom tool with an input_schema"
        )
        raise ApiError(message, f"{where}.type", "unsupported_parameter")
    if tool.get("input_schema") is None:
        field = f"{where}.input_schema"
        raise ApiError(f"{field} is missing", field, "missing_required_parameter")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _tool_choice(choice: object) -> tuple[object, bool]:
    """The choice as the chat has it, and whether there may be several calls."""
    if choice is None:
        return None, True
    if not isinstance(choice, dict):
        raise wrong_type("tool_choice", "an object", choice)
    parallel = not flag(choice, "disable_parallel_tool_use", "tool_choice.")
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    if not isinstance(kind, str) or kind not in CHOICES:
        message = f"tool_choice.type must be {', '.join(CHOICES)} or tool, not {short(kind)}"
        raise ApiError(message, "tool_choice.type", "invalid_value")
    return CHOICES[kind], parallel
