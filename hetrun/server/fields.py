"""From the body of a chat request to a `GenerateRequest`: types, limits, and what is not built yet."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from hetrun.errors import OptionError
from hetrun.events import GenerateRequest, Message, ModelInfo
from hetrun.params import SamplingParams
from hetrun.server.errors import ApiError, not_found
from hetrun.server.models import answers_to

DEFAULT_TEMPERATURE = 1.0  # OpenAI's
MOST_TOP_LOGPROBS = 20

# Handed to SamplingParams under their own names.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos", "logit_bias")
READ = ("model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n")
LOGPROBS = ("logprobs", "top_logprobs")

# They change nothing in the answer, so even a strict server takes them.
HINTS = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "parallel_tool_calls"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_prompt"),
)
# Known to clients and not built here, each with the values that ask for nothing. Ignoring another value would
# give an answer that is silently not what was asked for.
UNBUILT: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "dry_multiplier": (0,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "json_schema": ({},),
    "mirostat": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "repeat_penalty": (1, 0),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "typical_p": (1,),
    "web_search_options": (),
    "xtc_probability": (0,),
}
KNOWN = (*READ, *SAMPLING, *LOGPROBS, *HINTS, *UNBUILT)
ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True)
class ChatOrder:
    """What a chat request asked for."""

    request: GenerateRequest
    stream: bool
    include_usage: bool


def chat_order(body: Mapping[str, object], info: ModelInfo, strict: bool) -> ChatOrder:
    """Read a request; ApiError names the field that is wrong."""
    _refuse_unbuilt(body)
    _check_model(body, info, strict)
    if strict:
        _check_strictly(body)
    stream = _flag(body, "stream")
    return ChatOrder(
        GenerateRequest(_sampling(body, info), messages=_messages(body)),
        stream=stream,
        include_usage=_include_usage(body, stream),
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
        raise _wrong_type("model", "a string", model)
    # One model runs here, and most tools insist on sending the name of another.
    if strict and not answers_to(info, model):
        raise not_found(model)


def _check_strictly(body: Mapping[str, object]) -> None:
    for name in body:
        if name not in KNOWN:
            close = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise ApiError(f"Unrecognized request argument: {name}{hint}", name, "unknown_parameter")
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and temperature > 2:
        raise ApiError("temperature must be 2 or less", "temperature", "decimal_above_max_value")
    stop = body.get("stop")
    if isinstance(stop, list) and len(stop) > 4:
        raise ApiError(f"stop may hold 4 strings, not {len(stop)}", "stop", "array_above_max_length")


def _sampling(body: Mapping[str, object], info: ModelInfo) -> SamplingParams:
    own = DEFAULT_TEMPERATURE if info.temperature is None else info.temperature
    values: dict[str, object] = {"temperature": own}
    values |= {name: body[name] for name in SAMPLING if body.get(name) is not None}
    values["logprobs"] = _logprobs(body)
    for name in ("max_tokens", "max_completion_tokens"):  # the newer name wins
        if (limit := body.get(name)) is not None:
            _check_sampling(name, {"max_tokens": limit})
            values["max_tokens"] = limit
    for name, value in values.items():
        _check_sampling(name, {name: value})
    return SamplingParams.from_mapping(values)


def _check_sampling(field: str, values: Mapping[str, object]) -> None:
    """One value at a time, so that the error can name the field as the client called it."""
    try:
        SamplingParams.from_mapping(values)
    except OptionError as error:
        raise ApiError(str(error), field, "invalid_value") from None


def _logprobs(body: Mapping[str, object]) -> int | None:
    """How many alternatives are wanted for each token; None without log-probabilities."""
    wanted = _flag(body, "logprobs")
    top = body.get("top_logprobs")
    if top is None:
        return 0 if wanted else None
    if type(top) is not int or not 0 <= top <= MOST_TOP_LOGPROBS:
        message = f"top_logprobs must be an integer from 0 to {MOST_TOP_LOGPROBS}, not {top!r}"
        raise ApiError(message, "top_logprobs", "invalid_value")
    if not wanted:
        raise ApiError("top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    return top


def _include_usage(body: Mapping[str, object], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise _wrong_type("stream_options", "an object", options)
    if not stream:
        raise ApiError("stream_options needs stream: true", "stream_options", "invalid_value")
    return _flag(options, "include_usage", "stream_options.")


def _flag(body: Mapping[str, object], name: str, prefix: str = "") -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _wrong_type(prefix + name, "true or false", value)
    return value


def _wrong_type(param: str, wanted: str, value: object) -> ApiError:
    return ApiError(f"{param} must be {wanted}, not {type(value).__name__}", param, "invalid_type")


# --- messages


def _messages(body: Mapping[str, object]) -> tuple[Message, ...]:
    messages = body.get("messages")
    if messages is None:
        raise ApiError("messages is missing", "messages", "missing_required_parameter")
    if not isinstance(messages, list):
        raise _wrong_type("messages", "a list", messages)
    if not messages:
        raise ApiError("messages is empty: there is nothing to answer", "messages", "empty_array")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        raise _wrong_type(where, "an object", message)
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
            raise _wrong_type(f"{where}.name", "a string", name)
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
        raise _wrong_type(where, "a string or a list of parts", content)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise _wrong_type(where, "an object", part)
    kind = part.get("type")
    if kind != "text":
        message = f"{where}.type must be text, not {kind!r}: this server reads text only"
        raise ApiError(message, f"{where}.type", "invalid_value")
    text = part.get("text")
    if not isinstance(text, str):
        raise _wrong_type(f"{where}.text", "a string", text)
    return text
