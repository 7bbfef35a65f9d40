"""Tools for a template that knows nothing of them: told in the system message, calls and results as texts.

It is the form that most models have seen (Hermes', which Qwen's templates write too), so that a model without
any training for it has a chance as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hetrun.text.chat.template import ChatTemplate
from hetrun.text.tool_parsers.formats import takes_tools

Json = dict[str, Any]

BEFORE = "You can call functions. These are the functions, as JSON:\n<tools>\n"
BEHIND = (
    "\n</tools>\nTo call one, answer with its name and arguments as JSON within tags, once for each call:\n"
    '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>\n'
    "What a function returns comes within <tool_response></tool_response>."
)


def needs_telling(template: ChatTemplate, tools: object) -> bool:
    """Whether a template leaves out tools, or a conversation with calls of them."""
    source = (template.for_tools or template).source
    return not takes_tools(source) and (bool(tools) or "tool_calls" not in source)


def told(messages: Sequence[Json], tools: Sequence[Json] | None) -> list[Json]:
    """The same conversation in system, user and assistant messages of text only."""
    out: list[Json] = []
    if tools:
        out.append({"role": "system", "content": _description(tools)})
    before = ""
    for message in messages:
        role = message["role"]
        if role == "system" and out and out[-1]["role"] == "system":
            out[-1] = {**message, "content": f"{message['content']}\n\n{out[-1]['content']}"}
        elif role == "tool":
            _add_to_user(out, f"<tool_response>\n{message['content']}\n</tool_response>", before == "tool")
        elif role == "user" and before == "tool":
            _add_to_user(out, message["content"], True)
        elif message.get("tool_calls"):
            out.append({"role": role, "content": _calls(message)})
        else:
            out.append(message)
        before = role
    return out


def _add_to_user(out: list[Json], text: str, to_last: bool) -> None:
    """Templates that want users and assistants in turn would refuse two messages of a user."""
    if to_last:
        out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n{text}"}
    else:
        out.append({"role": "user", "content": text})


def _description(tools: Sequence[Json]) -> str:
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    return BEFORE + "\n".join(lines) + BEHIND


def _calls(message: Json) -> str:
    texts = [message["content"]] if message.get("content") else []
    for call in message["tool_calls"]:
        function = call.get("function") or {}
        said = {"name": function.get("name"), "arguments": function.get("arguments")}
        texts.append(f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>")
    return "\n".join(texts)
