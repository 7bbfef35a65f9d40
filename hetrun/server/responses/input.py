"""The input of a request for a response: a string or items, converted to messages."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr as short

from hetrun.client.events import Message
from hetrun.client.pictures import PART_TYPES
from hetrun.server.chat import MOST_ID, NONE_LOADED, SENSES, required_text, senseless
from hetrun.server.errors import ApiError, wrong_type
from hetrun.server.pictures.parts import Loaded, Part, content_of as joined, part_of, texts_of
from hetrun.text.chat.messages import ROLES as CHAT_ROLES

FIELD = "input"
ROLES = tuple(role for role in CHAT_ROLES if role != "tool")
TEXTS = ("input_text", "output_text", "text", "refusal")  # parts of messages that hold a text


def messages(value: object, loaded: Loaded = NONE_LOADED) -> list[Message]:
    """The messages of an input."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong_type(FIELD, "a string or a list of items", value)
    if not value:
        raise ApiError(f"{FIELD} is empty: there is nothing to answer", FIELD, "empty_array")
    found = _ItemReader(loaded)
    for i, item in enumerate(value):
        found.add(item, f"{FIELD}[{i}]")
    return list(found.messages)


def with_instructions(instructions: str | None, said: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with instructions before them.

    System messages at the beginning are merged, because most templates have only one.
    """
    leading = 0
    while leading < len(said) and said[leading]["role"] == "system":
        leading += 1
    texts = [] if instructions is None else [instructions]
    texts += [texts_of(message["content"]) for message in said[:leading]]
    system: list[Message] = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return (*system, *said[leading:])


class _ItemReader:
    """Converts items to messages. Reasoning and calls are separate items here, but parts of an assistant's
    message for templates."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.messages: list[dict[str, object]] = []
        self._thought = ""  # belongs to the next item

    def add(self, item: object, where: str) -> None:
        """Add the next item."""
        if not isinstance(item, dict):
            raise wrong_type(where, "an object", item)
        thought, self._thought = self._thought, ""
        match item.get("type"):
            case None | "message":
                message = _message(item, where, self._loaded)
                if thought and message["role"] == "assistant":
                    message["reasoning_content"] = thought
                self.messages.append(message)
            case "reasoning":
                self._thought = thought + _thought(item, where)
            case "function_call":
                self._call(_call(item, where), thought)
            case "function_call_output":
                self.messages.append(_answer(item, where, self._loaded))
            case "item_reference":
                why = f"{where} is a reference, but single items are not kept here: send the item itself"
                raise ApiError(why, f"{where}.type", "unsupported_parameter")
            case kind:
                known = "message, reasoning, function_call or function_call_output"
                why = f"{where}.type must be {known}, not {short(kind)}"
                raise ApiError(why, f"{where}.type", "invalid_value")

    def _call(self, call: Message, thought: str) -> None:
        """Put adjacent calls and the text before them into one message."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or thought:
            last = {"role": "assistant"}
            if thought:
                last["reasoning_content"] = thought
            self.messages.append(last)
        calls = last.setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(call)


def _thought(item: dict[str, object], where: str) -> str:
    """A model's reasoning; summaries, and reasoning encrypted by OpenAI, are not used."""
    content = item.get("content")
    return "" if content is None else content_text(content, f"{where}.content", ("reasoning_text",))


def _call(item: dict[str, object], where: str) -> Message:
    name = required_text(item, "name", where, MOST_ID)
    function = {"name": name, "arguments": required_text(item, "arguments", where)}
    return {"type": "function", "id": required_text(item, "call_id", where, MOST_ID), "function": function}


def _answer(item: dict[str, object], where: str, loaded: Loaded) -> dict[str, object]:
    call_id = required_text(item, "call_id", where, MOST_ID)
    content = content_of(item.get("output"), f"{where}.output", loaded)
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _message(item: dict[str, object], where: str, loaded: Loaded) -> dict[str, object]:
    role = item.get("role")
    if role is None:
        raise ApiError(f"{where}.role is missing", f"{where}.role", "missing_required_parameter")
    if role not in ROLES:
        raise ApiError(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role", "invalid_value")
    content = content_of(item.get("content"), f"{where}.content", loaded)
    # "developer" is OpenAI's newer name for the same role, and no template has it.
    return {"role": "system" if role == "developer" else role, "content": content}


def content_of(content: object, where: str, loaded: Loaded) -> str | list[Part]:
    """A text, or the parts of a content: texts as one, unless there are pictures among them."""
    if isinstance(content, str):
        return content
    parts: list[str | Part] = []
    for i, part in enumerate(_parts(content, where)):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind in PART_TYPES:
            parts.append(part_of(part, f"{where}[{i}]", loaded))
        else:
            parts.append(_part(part, f"{where}[{i}]", TEXTS))
    return joined(parts, "\n")


def content_text(content: object, where: str, kinds: Sequence[str] = TEXTS) -> str:
    """A text, or the texts of its parts, as one."""
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}[{i}]", kinds) for i, part in enumerate(_parts(content, where)))


def _parts(content: object, where: str) -> list[object]:
    if content is None:
        raise ApiError(f"{where} is missing", where, "missing_required_parameter")
    if not isinstance(content, list):
        raise wrong_type(where, "a string or a list of parts", content)
    return content


def _part(part: object, where: str, kinds: Sequence[str]) -> str:
    if not isinstance(part, dict):
        raise wrong_type(where, "an object", part)
    kind = part.get("type")
    if isinstance(kind, str) and kind in SENSES:
        raise senseless(kind, where)
    if kind not in kinds:
        message = f"{where}.type must be {' or '.join(kinds[:2])}, not {short(kind)}"
        raise ApiError(message, f"{where}.type", "invalid_value")
    name = "refusal" if kind == "refusal" else "text"
    text = part.get(name)
    if not isinstance(text, str):
        raise wrong_type(f"{where}.{name}", "a string", text)
    return text
