"""Anthropic's messages and system prompt, converted to those of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short

from hetrun.client.events import Message
from hetrun.server.errors import ApiError, wrong_type
from hetrun.server.fields import Body, flag
from hetrun.server.messages import MOST_ID, required_text

Json = dict[str, object]

# Claude Code's first system block. It differs in each request, so with it no prompt would begin like an
# earlier one, and none would be found in the prefix cache.
BILLING = "x-anthropic-billing-header"
ROLES = ("user", "assistant", "system")
ERROR = "Error: "  # before a tool's result that is an error, because templates have no mark for it
# Blocks that this server cannot read, with their names in errors.
SENSES: Mapping[str, str] = {"image": "images", "document": "documents", "container_upload": "files"}


def messages(body: Body, *, keep_billing: bool) -> tuple[Message, ...]:
    """The conversation, with the system prompt as its first message."""
    given = body.get("messages")
    if given is None:
        raise ApiError("messages is missing", "messages", "missing_required_parameter")
    if not isinstance(given, list):
        raise wrong_type("messages", "a list", given)
    if not given:
        raise ApiError("messages is empty: there is nothing to answer", "messages", "empty_array")
    said = _system(body.get("system"), keep_billing)
    for i, message in enumerate(given):
        said += _message(message, f"messages[{i}]")
    return tuple(said)


def _system(given: object, keep_billing: bool) -> list[Message]:
    if given is None or given == "":
        return []
    texts = _texts(given, "system")
    kept = [text for text in texts if keep_billing or not text.startswith(BILLING)]
    text = "\n".join(kept)
    return [{"role": "system", "content": text}] if text else []


def _message(message: object, where: str) -> list[Message]:
    if not isinstance(message, dict):
        raise wrong_type(where, "an object", message)
    role = message.get("role")
    if role is None:
        raise ApiError(f"{where}.role is missing", f"{where}.role", "missing_required_parameter")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role", "invalid_value")
    content, where = message.get("content"), f"{where}.content"
    if content is None:
        raise ApiError(f"{where} is missing", where, "missing_required_parameter")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if role == "assistant":
        return [_answer(_blocks(content, where), where)]
    if role == "system":
        return [{"role": role, "content": "\n".join(_texts(content, where))}]
    return _question(_blocks(content, where), where)


def _answer(blocks: list[Json], where: str) -> Message:
    """An assistant's earlier answer."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        match block["type"]:
            case "text":
                texts.append(required_text(block, "text", place))
            case "thinking":
                thoughts.append(required_text(block, "thinking", place))
            case "redacted_thinking":
                pass  # nobody but Anthropic can read it
            case "tool_use":
                calls.append(_call(block, place))
            case kind:
                raise _unknown(kind, place, "text, thinking or tool_use")
    message: Json = {"role": "assistant"}
    if texts or not calls:
        message["content"] = "\n".join(texts)
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _call(block: Json, where: str) -> Json:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise wrong_type(f"{where}.input", "an object", arguments)
    return {
        "type": "function",
        "id": required_text(block, "id", where, MOST_ID),
        "function": {"name": required_text(block, "name", where, MOST_ID), "arguments": arguments},
    }


def _question(blocks: list[Json], where: str) -> list[Message]:
    """A user's message: results of tools become messages of their own, in the same order."""
    said: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            said.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if block["type"] == "tool_result":
            flush()
            said.append(_result(block, place))
        else:
            texts.append(_text(block, place, "text or tool_result"))
    flush()
    if not said:
        raise ApiError(f"{where} is empty", where, "empty_array")
    return said


def _result(block: Json, where: str) -> Message:
    content = block.get("content")
    text = "" if content is None else "\n".join(_texts(content, f"{where}.content"))
    failed = flag(block, "is_error", f"{where}.") and not text.startswith(ERROR)
    return {
        "role": "tool",
        "tool_call_id": required_text(block, "tool_use_id", where, MOST_ID),
        "content": f"{ERROR}{text}" if failed else text,
    }


def _texts(content: object, where: str) -> list[str]:
    """A text, or blocks of text."""
    if isinstance(content, str):
        return [content]
    blocks = _blocks(content, where)
    return [_text(block, f"{where}[{i}]", "text") for i, block in enumerate(blocks)]


def _text(block: Json, where: str, wanted: str) -> str:
    kind = block["type"]
    if kind == "search_result":
        return "\n".join([required_text(block, "title", where), *_texts(block.get("content"), where)])
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return required_text(source, "data", f"{where}.source")
    if kind != "text":
        raise _unknown(kind, where, wanted)
    return required_text(block, "text", where)


def _blocks(content: object, where: str) -> list[Json]:
    """A list of blocks, each with a type."""
    if not isinstance(content, list):
        raise wrong_type(where, "a string or a list of blocks", content)
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise wrong_type(f"{where}[{i}]", "an object", block)
        required_text(block, "type", f"{where}[{i}]")
    return content


def _unknown(kind: object, where: str, wanted: str) -> ApiError:
    if isinstance(kind, str) and kind in SENSES:
        message = f"{where}.type is {kind}, but this server reads text only: it takes no {SENSES[kind]}"
    else:
        message = f"{where}.type must be {wanted}, not {short(kind)}"
    return ApiError(message, f"{where}.type", "invalid_value")
