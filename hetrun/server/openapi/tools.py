"""Tools in requests, and tool calls in requests and answers."""

from __future__ import annotations

from hetrun.server.chat import MOST_ID
from hetrun.server.openapi.schemas import (
    BOOLEAN,
    STRING,
    Json,
    array,
    const,
    either,
    enum,
    optional,
    string,
    struct,
)
from hetrun.text.answers.tools import CHOICES, MOST_TOOLS, NAME as NAMES

NAME: Json = {"type": "string", "pattern": f"^{NAMES.pattern}$"}
_FUNCTION = struct(
    {"name": NAME},
    {
        "description": optional(STRING),
        "parameters": optional({"type": "object"}),
        "strict": optional(BOOLEAN),
    },
)
TOOL = struct({"function": _FUNCTION}, {"type": const("function")})
_NAMED = struct({"function": struct({"name": NAME})}, {"type": const("function")})
FIELDS: dict[str, Json] = {
    "tools": array(TOOL, 0, MOST_TOOLS),
    "tool_choice": either(enum(*CHOICES), _NAMED),
    "parallel_tool_calls": BOOLEAN,
}
# In an assistant's message that is sent back, some clients have arguments as an object.
SENT = struct(
    {
        "id": string(0, MOST_ID),
        "function": struct({"name": string(0, MOST_ID), "arguments": either(STRING, {"type": "object"})}),
    },
    {"type": const("function")},
)
MADE = struct(
    {
        "id": STRING,
        "type": const("function"),
        "function": struct({"name": STRING, "arguments": STRING}),
    },
)
