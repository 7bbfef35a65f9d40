"""What goes into a chat template: messages and tools as plain JSON, in the shape that templates expect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from hetrun.errors import OptionError

Json = dict[str, Any]

MOST_DEPTH = 64  # of lists and objects in messages and tools
MOST_BITS = 8192  # of an integer: Python writes no longer ones as text
# What a message's role may be, and what templates call it: "developer" is OpenAI's newer word for "system".
ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # what an assistant thought; the first is the usual
# Variables that hetrun passes to templates, and further arguments of transformers' apply_chat_template: with
# these a client would get a prompt other than its messages (CVE-2025-62426).
RESERVED = frozenset(
    "messages tools documents bos_token eos_token add_generation_prompt continue_final_message "
    "tokenize chat_template conversation return_dict return_tensors".split()
)


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """A plain copy: `role` and `content` are texts; what else a message holds (tool calls, name) is kept."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise OptionError('messages must be a list like [{"role": "user", "content": "Hi"}]')
    if not messages:
        raise OptionError("messages is empty: give at least one message")
    return [_checked_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def checked_objects(name: str, objects: Sequence[Mapping[str, Any]] | None) -> list[Json] | None:
    """Tools or documents, as a plain copy."""
    if objects is None:
        return None
    if isinstance(objects, str | bytes | Mapping) or not isinstance(objects, Sequence):
        raise OptionError(f"{name} must be a list of JSON objects")
    for i, found in enumerate(objects):
        if not isinstance(found, Mapping):
            raise OptionError(f"{name}[{i}] must be a JSON object, not {type(found).__name__}")
    return [plain(f"{name}[{i}]", found) for i, found in enumerate(objects)]


def variants(messages: list[Json]) -> Iterator[list[Json]]:
    """The messages as transformers gives them to a template, then as others want them who fail on that.

    Only calls of tools differ. A message that is nothing but calls has no content, or None, or an empty text;
    the arguments of a call are an object, or JSON in a text; what was said before a call is left out where it
    was thought about, too (gpt-oss' template refuses to write both).
    """
    calls = [m for m in messages if m.get("tool_calls")]
    contents = (..., None, "") if any("content" not in m for m in calls) else (...,)
    texts = (False, True) if any(_objects(m) for m in calls) else (False,)
    silent = (False, True) if any(m.get("content") and m.get("thinking") for m in calls) else (False,)
    for leave_out, content, as_text in product(silent, contents, texts):
        said = [_unsaid(m) for m in messages] if leave_out else messages
        yield [_variant(m, content, as_text) if m.get("tool_calls") else m for m in said]


def tool_variants(tools: list[Json] | None) -> Iterator[list[Json] | None]:
    """The tools as they were given, then with a description each, which some templates take for granted."""
    yield tools
    functions = [tool.get("function") for tool in tools or ()]
    if any(isinstance(function, dict) and not function.get("description") for function in functions):
        yield [_described(tool) for tool in tools or ()]


def _described(tool: Json) -> Json:
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    return {**tool, "function": {**function, "description": function.get("description") or ""}}


def _unsaid(message: Json) -> Json:
    if not (message.get("tool_calls") and message.get("content") and message.get("thinking")):
        return message
    return {key: value for key, value in message.items() if key != "content"}


def _variant(message: Json, content: Any, as_text: bool) -> Json:  # noqa: ANN401
    changed = message if content is ... or "content" in message else {**message, "content": content}
    if not as_text:
        return changed
    calls = []
    for call in changed["tool_calls"]:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return {**changed, "tool_calls": calls}


def _objects(message: Json) -> bool:
    """Whether a call has its arguments as an object."""
    functions = [call.get("function") for call in message["tool_calls"]]
    return any(isinstance(f, dict) and isinstance(f.get("arguments"), dict) for f in functions)


def _checked_message(where: str, message: object) -> Json:
    if not isinstance(message, Mapping):
        raise OptionError(f"{where} must be an object with role and content, not {type(message).__name__}")
    # OpenAI's clients say null where they mean that there is nothing.
    checked: Json = {key: value for key, value in plain(where, message).items() if value is not None}
    role = checked.get("role")
    if not isinstance(role, str) or not role:
        raise OptionError(f"{where}.role must be a text such as system, user or assistant")
    calls = _calls(where, checked)
    if "content" in checked:
        checked["content"] = _checked_content(f"{where}.content", checked["content"])
    elif not (role == "assistant" and calls):
        raise OptionError(f"{where}.content is missing")
    for call in calls:
        _parse_arguments(call)
    thoughts = next((checked[name] for name in THOUGHTS if name in checked), None)
    # As transformers has it: templates read one name or the other.
    return checked if thoughts is None else {"thinking": thoughts, **checked, THOUGHTS[0]: thoughts}


def _checked_content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise OptionError(f"{where} must be a text or a list of parts, not {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise OptionError(
                f'{where}[{i}] must be {{"type": "text", "text": "..."}}: only text can be read'
                + (f", not {kind}" if isinstance(kind, str) and kind != "text" else "")
            )
        texts.append(text)
    return "\n".join(texts)  # as llama.cpp and vLLM join them


def _calls(where: str, message: Json) -> list[Json]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise OptionError(f"{where}.tool_calls must be a list of objects")
    return calls


def _parse_arguments(call: Json) -> None:
    """OpenAI's clients send a call's arguments as JSON in a text; templates want the object."""
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            arguments = plain("arguments", json.loads(function["arguments"]))
        except (ValueError, RecursionError, OptionError):
            return  # what the model once wrote need not be JSON: it is shown as it was
        if isinstance(arguments, dict):
            function["arguments"] = arguments


def plain(where: str, value: object, depth: int = 0) -> Any:  # noqa: ANN401
    """A copy in JSON's own types."""
    if depth > MOST_DEPTH:
        raise OptionError(f"{where} is nested more than {MOST_DEPTH} deep")
    if isinstance(value, str):
        return _text(where, value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise OptionError(f"{where} is a number of more than {MOST_BITS} bits")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        copy = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise OptionError(f"{where} has a key that is not text: {key!r}")
            copy[_text(where, key)] = plain(f"{where}.{key[:40]}", item, depth + 1)
        return copy
    if isinstance(value, list | tuple):
        return [plain(f"{where}[{i}]", item, depth + 1) for i, item in enumerate(value)]
    raise OptionError(f"{where} holds a {type(value).__name__}, which is not JSON")


def _text(where: str, text: str) -> str:
    copy = str.__str__(text)
    try:
        copy.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(copy[error.start]):04X}"
        raise OptionError(f"{where} holds {code}, half of a character: send valid UTF-8") from None
    return copy
