"""Anthropic's API: requests, messages, errors."""

from __future__ import annotations

import sys

from hetrun.client.sampling_params import LEAST_TEMPERATURE, MOST_STOPS, MOST_STRINGS
from hetrun.server import fields
from hetrun.server.anthropic import request
from hetrun.server.anthropic_format import errors as anthropic_errors
from hetrun.server.chat import MOST_ID
from hetrun.server.openapi.requests import FORMS, NOTHING, SAMPLING
from hetrun.server.openapi.schemas import (
    ANYTHING,
    BOOLEAN,
    STRING,
    Json,
    array,
    const,
    described,
    either,
    enum,
    integer,
    number,
    optional,
    ref,
    string,
    struct,
)
from hetrun.text.answers.tools import MOST_TOOLS, NAME

_COUNT = integer(0)
_NAME: Json = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_TEXT = struct({"type": const("text"), "text": STRING})
_SOURCE = either(
    struct({"type": const("base64"), "data": STRING}, {"media_type": STRING}),
    struct({"type": const("url"), "url": STRING}),
)
_IMAGE = struct({"type": const("image"), "source": _SOURCE})
_ID = string(0, MOST_ID)
_RESULT = struct(
    {"type": const("tool_result"), "tool_use_id": _ID},
    {"content": optional(either(STRING, array(either(_TEXT, _IMAGE)))), "is_error": optional(BOOLEAN)},
)
_CALL = struct({"type": const("tool_use"), "id": _ID, "name": _ID, "input": {"type": "object"}})
_THINKING = struct({"type": const("thinking"), "thinking": STRING}, {"signature": STRING})
_REDACTED = struct({"type": const("redacted_thinking")}, {"data": STRING})
_MESSAGE = either(
    struct({"role": const("user"), "content": either(STRING, array(either(_TEXT, _IMAGE, _RESULT)))}),
    struct({"role": const("system"), "content": either(STRING, array(_TEXT))}),
    struct(
        {
            "role": const("assistant"),
            "content": either(STRING, array(either(_TEXT, _CALL, _THINKING, _REDACTED))),
        }
    ),
)
_TOOL = struct(
    {"name": _NAME, "input_schema": {"type": "object"}},
    {"type": optional(const("custom")), "description": optional(STRING), "strict": optional(BOOLEAN)},
)
_PARALLEL: dict[str, Json] = {"disable_parallel_tool_use": optional(BOOLEAN)}
_FORM = struct({"type": const("json_schema"), "schema": {"type": "object"}})
_OWN: dict[str, Json] = {
    "system": either(STRING, array(_TEXT)),
    "metadata": struct({}, {"user_id": optional(STRING)}),
    "output_config": struct({}, {"effort": enum(*request.EFFORTS, None), "format": optional(_FORM)}),
    "output_format": described(_FORM, "an older name of output_config.format"),
    "stop_sequences": array(string(1, MOST_STRINGS), 0, MOST_STOPS),
    "thinking": struct(
        {"type": enum(*request.THINKING)},
        {
            "budget_tokens": described(optional(integer(1)), "not enforced"),
            "display": enum(*request.DISPLAYS),
        },
    ),
    "tool_choice": either(
        struct({"type": enum(*request.CHOICES)}, _PARALLEL),
        struct({"type": const("tool"), "name": _NAME}, _PARALLEL),
    ),
    "tools": array(_TOOL, 0, MOST_TOOLS),
    "chat_template_kwargs": {"type": "object"},
}
_SHARED: dict[str, Json] = {
    "model": STRING,
    "stream": BOOLEAN,
    "priority": integer(-fields.MOST_PRIORITY, fields.MOST_PRIORITY),
    "deadline_s": {"type": "number", "exclusiveMinimum": 0, "maximum": fields.MOST_DEADLINE_S},
    **{name: FORMS[name] for name in request.SHARED if name in FORMS},
    **{name: SAMPLING[name] for name in request.SAMPLING},
    "temperature": described(
        either(const(0), number(LEAST_TEMPERATURE, sys.float_info.max)), "at most 1 with --strict"
    ),
}
_OPTIONAL = {
    name: optional(schema)
    for name, schema in {
        **dict.fromkeys(request.HINTS, ANYTHING),
        **dict.fromkeys(request.NEVER, NOTHING),
        **_SHARED,
        **_OWN,
    }.items()
}
_MESSAGES: dict[str, Json] = {"messages": array(_MESSAGE, 1)}
_USAGE = struct(
    {
        "input_tokens": described(_COUNT, "without those from the cache"),
        "cache_creation_input_tokens": _COUNT,
        "cache_read_input_tokens": _COUNT,
        "output_tokens": _COUNT,
        "output_tokens_details": struct({"thinking_tokens": _COUNT}),
    }
)
_BLOCK = either(
    _TEXT,
    _THINKING,
    struct({"type": const("tool_use"), "id": STRING, "name": STRING, "input": {"type": "object"}}),
)
COUNT = struct({"input_tokens": _COUNT})
SCHEMAS: Json = {
    "AnthropicRequest": struct(
        {"max_tokens": described(integer(0), "0: only read the prompt, for the cache"), **_MESSAGES},
        _OPTIONAL,
    ),
    "AnthropicCountRequest": struct(_MESSAGES, {**_OPTIONAL, "max_tokens": ANYTHING}),
    "AnthropicMessage": struct(
        {
            "id": STRING,
            "type": const("message"),
            "role": const("assistant"),
            "model": STRING,
            "content": array(_BLOCK),
            "stop_reason": enum(
                "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
            ),
            "stop_sequence": optional(STRING),
            "usage": _USAGE,
            "timings": ref("Timings"),
        }
    ),
    "AnthropicError": struct(
        {
            "type": const("error"),
            "error": struct(
                {
                    "type": enum(
                        "invalid_request_error", "api_error", *sorted({*anthropic_errors.KINDS.values()})
                    ),
                    "message": STRING,
                }
            ),
        }
    ),
}
STREAM = described(
    ANYTHING,
    "Events with names as Anthropic has them: message_start, ping, content_block_start, content_block_delta, "
    "content_block_stop, message_delta with the usage, message_stop; or error.",
)
