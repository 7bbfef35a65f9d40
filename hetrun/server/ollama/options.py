"""The fields of Ollama's requests, converted to those of a chat in OpenAI's format."""

from __future__ import annotations

import difflib
import math
import re
from reprlib import repr as short

from hetrun.client.events import ModelInfo
from hetrun.server import sampling
from hetrun.server.errors import ApiError, wrong_type
from hetrun.server.fields import Body, count, flag, object_of
from hetrun.server.service import Service

Json = dict[str, object]

DEFAULT_TEMPERATURE = 0.8  # Ollama's, if neither the server nor the model's file recommends another
LEVELS = ("low", "medium", "high", "max")  # of thinking
UNLIMITED = (0, -1, -2)  # values of num_predict without a limit
SHARED = ("logprobs", "top_logprobs", "priority", "deadline_s", "user")  # named as in a chat
# Options with no effect, each with its type. Those of loading are fixed when the server starts; the others
# were removed from Ollama, which ignores them, too.
NUMBERS = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_gqa", "num_keep"),
    *("rope_frequency_base", "rope_frequency_scale", "tfs_z", "draft_num_predict"),
)
FLAGS = (
    *("numa", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only"),
    "penalize_newline",
)
WHOLE = ("top_k", "repeat_last_n", "mirostat", "seed", "min_keep", "num_predict")
KNOWN = (*sampling.SAMPLING, "num_predict", *NUMBERS, *FLAGS)
# Names of fields in errors of the chat, and their names here.
NAMES = (
    (re.compile(r"\bresponse_format(\.json_schema)?(\.schema)?"), "format"),
    (re.compile(r"\bn_predict\b"), "num_predict"),
    (re.compile(r"\breasoning_effort\b"), "think"),
)
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = rf"(\d+\.?\d*|\.\d+)({'|'.join(UNITS)})"
PART, DURATION = re.compile(_PART, re.ASCII), re.compile(rf"[+-]?(?:{_PART})+", re.ASCII)
NUMBER = re.compile(r"[+-]?\d{1,12}(\.\d{1,9})?", re.ASCII)
MOST_DURATION = 64  # characters
FOREVER_S = 1e9  # longer than a server runs


def as_chat(body: Body, info: ModelInfo, service: Service) -> Json:
    """The same request in the chat's format, without its messages."""
    options = object_of(body, "options")
    check_options(options, service)
    chat: Json = {name: body[name] for name in SHARED if body.get(name) is not None}
    for name in (*sampling.SAMPLING, "num_predict"):
        value = options.get(name)
        if value is not None:
            chat[name] = _whole(value) if name in WHOLE else value
    _limit(chat)
    if isinstance(seed := chat.get("seed"), int) and seed < 0:
        del chat["seed"]  # any negative one means a random one
    if info.temperature is None and "temperature" not in service.sampling:
        chat.setdefault("temperature", DEFAULT_TEMPERATURE)
    return chat | _format(body.get("format"))


def streams(body: Body) -> bool:
    """Whether the answer is streamed, as it is unless the client says otherwise."""
    return body.get("stream") is None or flag(body, "stream")


def thinking(body: Body, info: ModelInfo, service: Service, name: str) -> Json:
    """The chat's fields for `think`: a flag or a level."""
    think = body.get("think")
    if think is None:
        return {}
    if not isinstance(think, bool) and think not in LEVELS:
        message = f"think must be true, false or one of {', '.join(LEVELS)}, not {short(think)}"
        raise ApiError(message, "think", "invalid_value")
    if think and not can_think(info, service):
        raise ApiError(f'"{name}" does not support thinking', "think", "unsupported_parameter")
    if isinstance(think, bool):
        return {"chat_template_kwargs": {"enable_thinking": think}}
    return {"reasoning_effort": think}


def can_think(info: ModelInfo, service: Service) -> bool:
    """Whether the model thinks before it answers."""
    return bool(info.thought_mark) or service.reasoning_format == "deepseek"


def check_options(options: Body, service: Service) -> None:
    """Check options without effect. As in Ollama, unknown ones are ignored, unless the server is strict."""
    for name in (*NUMBERS, *FLAGS):
        value = options.get(name)
        kind = bool if name in FLAGS else int | float
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)):
            raise wrong_type(f"options.{name}", "true or false" if kind is bool else "a number", value)
    if not service.strict:
        return
    for name in options:
        if name not in KNOWN:
            close = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise ApiError(f"There is no option {name[:80]}{hint}", "options", "unknown_parameter")


def _whole(value: object) -> object:
    """JSON of other languages may write an integer as 40.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _limit(chat: Json) -> None:
    limit = chat.pop("num_predict", None)
    if limit is not None and not (type(limit) is int and limit in UNLIMITED):
        if type(limit) is not int or limit < 0:
            said = f"num_predict must be an integer of 1 or more, or -1 for no limit, not {short(limit)}"
            raise ApiError(said, "options.num_predict", "invalid_value")
        chat["n_predict"] = limit


def _format(value: object) -> Json:
    if value is None or value == "":
        return {}
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(value, dict):
        raise ApiError(
            f'format must be "json" or a JSON schema, not {short(value)}', "format", "invalid_value"
        )
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}


def keep_alive_s(body: Body) -> float | None:
    """Seconds for which the model stays loaded after the request; infinite: for ever; None: not given.

    A number of seconds, or a duration in Go's words, such as 1h30m; any negative one means for ever.
    """
    value = body.get("keep_alive")
    if value is None:
        return None
    seconds = _seconds(value)
    if seconds is None or math.isnan(seconds):
        message = f"keep_alive must be a number of seconds or a duration such as 5m, not {short(value)}"
        raise ApiError(message, "keep_alive", "invalid_value")
    return seconds if 0 <= seconds < FOREVER_S else math.inf


def _seconds(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(max(min(value, FOREVER_S), -1))
    if not isinstance(value, str) or len(value) > MOST_DURATION:
        return None
    if NUMBER.fullmatch(value):
        return float(value)
    if not DURATION.fullmatch(value):
        return None
    total = sum(float(n) * UNITS[unit] for n, unit in PART.findall(value))
    return -total if value.startswith("-") else total


def text_of(body: Body, name: str) -> str:
    """A field that is a text; empty if it is not given."""
    value = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    return value


def dimensions(body: Body, most: int) -> int | None:
    """How many numbers of a vector are wanted; as in Ollama, 0 and more than there are mean all."""
    wanted = count(body, "dimensions", 0, 2**31 - 1)
    return wanted if wanted and wanted < most else None
