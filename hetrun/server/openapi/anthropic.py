"""Anthropic's API: bodies, answers and errors."""

from __future__ import annotations

from hetrun.client.sampling_params import MOST_STOPS, MOST_STRINGS
from hetrun.server import fields
from hetrun.server.anthropic.request import EFFORTS, THINKING
from hetrun.server.messages import MOST_ID
from hetrun.server.openapi.requests import SAMPLING
from hetrun.server.openapi.schemas import (
    BOOLEAN,
    INTEGER,
    STRING,
    Json,
    array,
    const,
    described,
    either,
    enum,
    integer,
    optional,
    string,
    struct,
)
from hetrun.server.openapi.tools import NAME

_OBJECT: Json = {"type": "object"}
_TEXT = struct({"type": const("text"), "text": STRING})
_TEXTS = either(STRING, array(_TEXT))
_THOUGHT = struct({"type": const("thinking"), "thinking": STRING}, {"signature": STRING})
_CALL = struct(
    {"type": const("tool_use"), "id": string(0, MOST_ID), "name": string(0, MOST_ID), "input": _OBJECT}
)
_RESULT = struct(
    {"type": const("tool_result"), "tool_use_id": string(0, MOST_ID)},
    {"content": optional(_TEXTS), "is_error": optional(BOOLEAN)},
)
_MESSAGE = either(
    struct({"role": const("user"), "content": either(STRING, array(either(_TEXT, _RESULT), 1))}),
    struct({"role": const("assistant"), "content": either(STRING, array(either(_TEXT, _THOUGHT, _CALL)))}),
    struct({"role": const("system"), "content": _TEXTS}),
)
_TOOL = struct({"name": NAME, "input_schema": _OBJECT}, {"description": STRING, "type": const("custom")})
_CHOICE = struct(
    {"type": enum("auto", "any", "tool", "none")}, {"name": STRING, "disable_parallel_tool_use": BOOLEAN}
)
_FORM = struct({"type": const("json_schema"), "schema": _OBJECT})
_PROMPT: dict[str, Json] = {"model": STRING, "messages": array(_MESSAGE, 1)}
_MORE: dict[str, Json] = {
    "system": optional(_TEXTS),
    "tools": optional(array(_TOOL)),
    "tool_choice": optional(_CHOICE),
    "thinking": optional(
        struct(
            {"type": enum(*THINKING)}, {"budget_tokens": INTEGER, "display": enum("summarized", "omitted")}
        )
    ),
    "output_config": optional(
        struct({}, {"effort": optional(enum(*EFFORTS)), "format": optional(_FORM)}),
    ),
    "chat_template_kwargs": optional(_OBJECT),
}
_SAMPLED: dict[str, Json] = {
    **{name: optional(SAMPLING[name]) for name in ("temperature", "top_p", "top_k")},
    "stop_sequences": optional(array(string(1, MOST_STRINGS), 0, MOST_STOPS)),
    "stream": optional(BOOLEAN),
    "metadata": optional(struct({}, {"user_id": optional(STRING)})),
    "priority": optional(integer(-fields.MOST_PRIORITY, fields.MOST_PRIORITY)),
    "deadline_s": optional({"type": "number", "exclusiveMinimum": 0, "maximum": fields.MOST_DEADLINE_S}),
}
_COUNT = integer(0)
_USAGE = struct(
    {
        "input_tokens": described(_COUNT, "without those of the prefix cache"),
        "cache_creation_input_tokens": const(0),
        "cache_read_input_tokens": _COUNT,
        "output_tokens": _COUNT,
    }
)
_ANSWER = struct(
    {
        "id": STRING,
        "type": const("message"),
        "role": const("assistant"),
        "model": STRING,
        "content": array(either(_TEXT, _THOUGHT, _CALL)),
        "stop_reason": enum("end_turn", "max_tokens", "stop_sequence", "tool_use", None),
        "stop_sequence": optional(STRING),
        "usage": _USAGE,
    }
)
_ERROR = struct({"type": const("error"), "error": struct({"type": STRING, "message": STRING})})
SCHEMAS: Json = {
    "AnthropicRequest": struct(_PROMPT | {"max_tokens": integer(1)}, _MORE | _SAMPLED),
    "AnthropicCountRequest": struct(_PROMPT, _MORE),
    "AnthropicMessage": _ANSWER,
    "AnthropicCount": struct({"input_tokens": _COUNT}),
    "AnthropicError": _ERROR,
}
EVENTS = described(STRING, "events: message_start, content_block_start, ..., message_stop")
