"""What Gemma 4's templates do not write of a conversation with calls of tools, or not as the model knows it.

The first ones know results of tools as a part of the message that has the calls, and write a message of a
tool as a turn, which no model has seen. Later ones write such results, but end the turn where text stands
beside the calls, and then begin none for the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

TURN, TURN_END = "<|turn>model\n", "<turn|>\n"


def suited(source: str, messages: list[Json]) -> list[Json]:
    """The messages as this template wants them."""
    wants = "tool_responses" in source and "tool_call_id" not in source
    return _with_results(messages) if wants else messages


def ready(source: str, text: str) -> str:
    """A prompt in which the model has its turn."""
    ended = text.endswith(TURN_END) and "<|turn>" in source and "tool_responses" in source
    return text + TURN if ended else text


def _with_results(messages: list[Json]) -> list[Json]:
    """Results in the message that has the calls, and there too what was answered to them."""
    out: list[Json] = []
    waits = False  # for results, or for the answer
    for message in messages:
        role, last = message.get("role"), out[-1] if out else {}
        if waits and role == "tool":
            results = [*last.get("tool_responses", ()), _result(last, message)]
            out[-1] = {**last, "tool_responses": results}
            continue
        answers = waits and role == "assistant" and not message.get("tool_calls")
        if answers and last.get("tool_responses") and not last.get("content"):
            out[-1] = {**last, "content": message.get("content", "")}
        else:
            out.append(message)
        waits = bool(message.get("tool_calls"))
    return out


def _result(called: Mapping[str, Any], message: Mapping[str, Any]) -> Json:
    """What a tool has said, and which one it was."""
    calls = called["tool_calls"]
    by_id = {call.get("id"): call for call in reversed(calls)}
    nth = len(called.get("tool_responses", ()))
    call = by_id.get(message.get("tool_call_id")) or (calls[nth] if nth < len(calls) else {})
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return {"name": name or message.get("name") or "unknown", "response": _read(message.get("content", ""))}


def _read(text: str) -> Json | str:
    """An object where the text is one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text
