"""From the body of a chat request to a `GenerateRequest`: types, limits, and what is not built yet."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from hetrun.events import GenerateRequest, Message, ModelInfo
from hetrun.server import sampling
from hetrun.server.errors import ApiError, not_found, wrong_type
from hetrun.server.models import answers_to
from hetrun.server.sampling import flag
from hetrun.server.service import Service

READ = (
    *("model", "messages", "stream", "stream_options", "n", "chat_template_kwargs"),
    *("user", "safety_identifier", "priority", "deadline_s"),
)

# They change nothing in the answer, so even a strict server takes them.
HINTS = (
    *("metadata", "store", "service_tier", "prediction", "parallel_tool_calls"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_prompt"),
)
# Known to clients and not built here, each with the values that ask for nothing. Ignoring another value would
# give an answer that is silently not what was asked for.
UNBUILT: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
KNOWN = (*READ, *sampling.NAMES, *HINTS, *UNBUILT)
ROLES = ("system", "developer", "user", "assistant")

MOST_PRIORITY = 2**31 - 1
MOST_DEADLINE_S = 10**9
MOST_TEMPLATE_OPTIONS = 1 << 14  # characters of JSON
# What a template is given by us, and what transformers' apply_chat_template takes besides: whoever sets these
# from outside gets another prompt than the messages' (CVE-2025-62426).
RESERVED = frozenset(
    "messages tools documents bos_token eos_token add_generation_prompt continue_final_message "
    "tokenize chat_template conversation return_dict return_tensors".split()
)


@dataclass(frozen=True)
class ChatOrder:
    """What a chat request asked for."""

    request: GenerateRequest
    stream: bool
    include_usage: bool
    form: str | None = None  # the field that says what the answer must look like


def chat_order(body: Mapping[str, object], info: ModelInfo, service: Service, client: str = "") -> ChatOrder:
    """Read a request of this client; ApiError names the field that is wrong."""
    _refuse_unbuilt(body)
    _check_model(body, info, service.strict)
    if service.strict:
        _refuse_unknown(body)
        sampling.check_strictly(body)
    stream = flag(body, "stream")
    params = sampling.sampling_params(body, info, service.sampling)
    messages, options = _messages(body), _template_options(body)
    return ChatOrder(
        GenerateRequest(
            params,
            messages=messages,
            template_options=options,
            client=client,
            priority=_priority(body),
            deadline_s=_deadline_s(body),
            whole=not stream,
        ),
        stream=stream,
        include_usage=_include_usage(body, stream),
        form=sampling.form_field(body),
    )


def _refuse_unbuilt(body: Mapping[str, object]) -> None:
    for name, neutral in UNBUILT.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise ApiError(f"{name} is not supported by this server yet", name, "unsupported_parameter")
    n = body.get("n")
    if n is not None and (type(n) is not int or n != 1):
        message = f"n must be 1: this server gives one answer to a request, not {n!r}"
        raise ApiError(message, "n", "unsupported_parameter" if type(n) is int and n > 1 else "invalid_value")


def _check_model(body: Mapping[str, object], info: ModelInfo, strict: bool) -> None:
    model = body.get("model")
    if model is None:
        return
    if not isinstance(model, str):
        raise wrong_type("model", "a string", model)
    # One model runs here, and most tools insist on sending the name of another.
    if strict and not answers_to(info, model):
        raise not_found(model)


def _refuse_unknown(body: Mapping[str, object]) -> None:
    for name in body:
        if name not in KNOWN:
            close = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise ApiError(f"Unrecognized request argument: {name}{hint}", name, "unknown_parameter")


def _template_options(body: Mapping[str, object]) -> Mapping[str, object]:
    """Further variables of the template, such as enable_thinking."""
    field = "chat_template_kwargs"
    options = body.get(field)
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise wrong_type(field, "an object", options)
    for name in options:
        if name in RESERVED:
            raise ApiError(f"{field} may not set {name}", f"{field}.{name}", "invalid_value")
    if len(json.dumps(options)) > MOST_TEMPLATE_OPTIONS:
        message = f"{field} may have {MOST_TEMPLATE_OPTIONS} characters of JSON"
        raise ApiError(message, field, "invalid_value")
    return options


def _priority(body: Mapping[str, object]) -> int:
    """As vLLM has it: lower ones go first."""
    value = body.get("priority")
    if value is None:
        return 0
    if type(value) is not int:
        raise wrong_type("priority", "an integer", value)
    if abs(value) > MOST_PRIORITY:
        message = f"priority must be from {-MOST_PRIORITY} to {MOST_PRIORITY}"
        raise ApiError(message, "priority", "invalid_value")
    return value


def _deadline_s(body: Mapping[str, object]) -> float | None:
    """Seconds behind which nobody wants the answer: hetrun's own field."""
    value = body.get("deadline_s")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type("deadline_s", "a number of seconds", value)
    if not 0 < value <= MOST_DEADLINE_S:
        raise ApiError(
            f"deadline_s must be above 0, at most {MOST_DEADLINE_S:g}", "deadline_s", "invalid_value"
        )
    return float(value)


def _include_usage(body: Mapping[str, object], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise wrong_type("stream_options", "an object", options)
    if not stream:
        raise ApiError("stream_options needs stream: true", "stream_options", "invalid_value")
    return flag(options, "include_usage", "stream_options.")


# --- messages


def _messages(body: Mapping[str, object]) -> tuple[Message, ...]:
    messages = body.get("messages")
    if messages is None:
        raise ApiError("messages is missing", "messages", "missing_required_parameter")
    if not isinstance(messages, list):
        raise wrong_type("messages", "a list", messages)
    if not messages:
        raise ApiError("messages is empty: there is nothing to answer", "messages", "empty_array")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        raise wrong_type(where, "an object", message)
    role = message.get("role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise ApiError(f"{where}: tools are not supported by this server yet", where, "unsupported_parameter")
    if role is None:
        raise ApiError(f"{where}.role is missing", f"{where}.role", "missing_required_parameter")
    if role not in ROLES:
        raise ApiError(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role", "invalid_value")
    # "developer" is OpenAI's newer word for the same thing, and no template knows it.
    read: dict[str, object] = {"role": "system" if role == "developer" else role}
    read["content"] = _content(message.get("content"), f"{where}.content", optional=role == "assistant")
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise wrong_type(f"{where}.name", "a string", name)
        read["name"] = name
    return read


def _content(content: object, where: str, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if optional:
            return ""
        raise ApiError(f"{where} is missing", where, "missing_required_parameter")
    if not isinstance(content, list):
        raise wrong_type(where, "a string or a list of parts", content)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type(where, "an object", part)
    kind = part.get("type")
    if kind != "text":
        message = f"{where}.type must be text, not {kind!r}: this server reads text only"
        raise ApiError(message, f"{where}.type", "invalid_value")
    text = part.get("text")
    if not isinstance(text, str):
        raise wrong_type(f"{where}.text", "a string", text)
    return text
