"""The names of a request's fields, and how single ones are read: types and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short

from hetrun.client.events import ContextShift
from hetrun.server.errors import ApiError, wrong_type

Body = Mapping[str, object]

# Fields of both endpoints besides prompts and sampling.
READ = (
    *("model", "stream", "stream_options", "n"),
    *("user", "safety_identifier", "priority", "deadline_s"),
    *("cache_prompt", "id_slot", "n_keep", "n_discard", "context_shift", "return_progress"),
    "t_max_predict_ms",
)
# Fields of OpenAI's and llama.cpp's APIs that don't change answers here, so that even a strict server accepts
# them.
HINTS = (
    *("metadata", "store", "service_tier", "prediction", "parallel_tool_calls", "verbosity", "moderation"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort"),
    *("n_cache_reuse", "t_max_prompt_ms", "timings_per_token", "return_tokens", "post_sampling_probs"),
    *("response_fields", "backend_sampling", "sse_ping_interval"),
)
# Fields that are not supported, each with the values that have no effect. Ignoring any other value would
# silently give a wrong answer.
UNBUILT: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
# Fields that will never be supported, each with the reason.
NEVER: Mapping[str, str] = {
    "lora": "adapters are not supported; serve a model into which they were merged",
    "image_data": "send prompt as an object with prompt_string and multimodal_data",
    "multimodal_data": "it belongs into prompt, an object with prompt_string and multimodal_data",
}

CHAT_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs", "n_probs")
COMPLETION_LOGPROBS = ("logprobs", "n_probs")
MOST_TOP = 20
MOST_LEGACY_TOP = 5

MOST_PRIORITY = 2**31 - 1
MOST_DEADLINE_S = 10**9
MOST_TOKENS = 2**31 - 1  # of llama.cpp's numbers


def object_of(body: Body, name: str) -> dict[str, object]:
    """An object; empty if it is not given."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    return value


def flag(body: Body, name: str, prefix: str = "") -> bool:
    """A boolean; false if it is not given."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise wrong_type(prefix + name, "true or false", value)
    return value


def count(body: Body, name: str, least: int, most: int) -> int | None:
    """An integer within limits, if it is given."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        message = f"{name} must be an integer from {least} to {most}, not {short(value)}"
        raise ApiError(message, name, "invalid_value")
    return value


def priority(body: Body) -> int:
    """The priority, as in vLLM: lower ones go first."""
    value = body.get("priority")
    if value is None:
        return 0
    if type(value) is not int:
        raise wrong_type("priority", "an integer", value)
    return count(body, "priority", -MOST_PRIORITY, MOST_PRIORITY) or 0


def deadline_s(body: Body) -> float | None:
    """Seconds after which the answer is useless; hetrun's own field."""
    value = body.get("deadline_s")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type("deadline_s", "a number of seconds", value)
    if not 0 < value <= MOST_DEADLINE_S:
        message = f"deadline_s must be above 0, at most {MOST_DEADLINE_S:g}"
        raise ApiError(message, "deadline_s", "invalid_value")
    return float(value)


def context_shift(body: Body) -> ContextShift | None:
    """What becomes of a text that fills the context; None: nothing is said of it."""
    on = None if body.get("context_shift") is None else flag(body, "context_shift")
    keep = count(body, "n_keep", -1, MOST_TOKENS)
    discard = count(body, "n_discard", 0, MOST_TOKENS)
    if on is None and keep is None and discard is None:
        return None
    return ContextShift(on, keep or 0, discard or 0)


def slot(body: Body) -> int | None:
    """The number of the place that a request wants; None: any."""
    number = count(body, "id_slot", -1, MOST_TOKENS)
    return None if number == -1 else number


def line_limit_s(body: Body) -> float | None:
    """For how long an answer may be written, but for its first line."""
    limit = count(body, "t_max_predict_ms", -1, MOST_TOKENS) or 0
    return limit / 1000 if limit > 0 else None


def include_usage(body: Body, stream: bool) -> bool:
    """Whether a stream ends with its token counts."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise wrong_type("stream_options", "an object", options)
    if not stream:
        raise ApiError("stream_options needs stream: true", "stream_options", "invalid_value")
    return flag(options, "include_usage", "stream_options.")


# --- log-probabilities


@dataclass(frozen=True)
class LogprobCount:
    """The number of alternatives for each token; None: no log-probabilities at all."""

    answer: int | None = None
    prompt: int | None = None


def wanted_of_chat(body: Body) -> LogprobCount:
    """OpenAI's two fields, llama.cpp's one, and vLLM's for the prompt."""
    wanted = flag(body, "logprobs")
    top = count(body, "top_logprobs", 0, MOST_TOP)
    if top is not None and not wanted:
        raise ApiError("top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    probs = count(body, "n_probs", 0, MOST_TOP)
    answer = (top or 0) if wanted else probs or None
    prompt = count(body, "prompt_logprobs", 0, MOST_TOP)
    if prompt is not None and flag(body, "stream"):
        # There is no streaming format for it.
        raise ApiError("prompt_logprobs needs stream: false", "prompt_logprobs", "invalid_value")
    return LogprobCount(answer, prompt)


def wanted_of_completion(body: Body, echo: bool) -> LogprobCount:
    """The older endpoint has one number for it, and includes the prompt's if it is echoed."""
    if isinstance(body.get("logprobs"), bool):
        raise wrong_type("logprobs", f"an integer from 0 to {MOST_LEGACY_TOP}", body["logprobs"])
    if body.get("prompt_logprobs") is not None:
        message = "prompt_logprobs is for chat completions; here echo: true with logprobs gives the same"
        raise ApiError(message, "prompt_logprobs", "unsupported_parameter")
    answer = count(body, "logprobs", 0, MOST_LEGACY_TOP)
    if answer is None:
        answer = count(body, "n_probs", 0, MOST_TOP) or None
    return LogprobCount(answer, answer if echo else None)
