"""The conversation of a request: `system` and messages with blocks, converted to messages for templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from reprlib import repr as short

from hetrun.client.events import Message
from hetrun.server.anthropic.signature import thought_of
from hetrun.server.chat import MOST_ID, given_messages, nothing_to_answer, required_text
from hetrun.server.errors import ApiError, wrong_type
from hetrun.server.pictures.parts import Loaded, Part, content_of, from_base64, from_url
from hetrun.text.tool_parsers.parts import GAP

Json = dict[str, object]

ROLES = ("user", "assistant", "system")
# Claude Code writes it at the beginning of its system prompt, with a number that changes with every request.
BILLING = "x-anthropic-billing-header"
LATER = "<system>\n{}\n</system>"  # a system message in the middle of a conversation
FAILED = "Error: "  # before the result of a call that failed: templates have no field for that
# What results of failed calls begin with where they say it themselves.
SAYS_SO = ("error", "<tool_use_error>", "<error>")
MEDIA: Mapping[str, str] = {"document": "documents", "container_upload": "files"}
IMAGE = "image"
# Blocks about tools that Anthropic's servers run.
THEIRS = ("server_tool_use", "mcp_tool_use", "mcp_tool_result")
THEIR_RESULT = "_tool_result"  # the end of the types of their results


def conversation(
    body: Mapping[str, object], loaded: Loaded, *, keep_billing_header: bool
) -> tuple[Message, ...]:
    """The messages of a request, its system prompt first."""
    given = given_messages(body)
    found = _Conversation(loaded)
    if body.get("system") is not None:
        found.add_text("system", _system(body["system"], keep_billing_header))
    for i, message in enumerate(given):
        found.add(message, f"messages[{i}]")
    if all(message["role"] == "system" for message in found.messages):
        raise nothing_to_answer()
    return tuple(found.messages)


def _system(system: object, keep_billing_header: bool) -> str:
    """The system prompt; blocks are joined by line ends."""
    texts = [system] if isinstance(system, str) else _texts(system, "system")
    if not keep_billing_header:
        texts = [_without_billing(text) for text in texts]
    return "\n".join(text for text in texts if text)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _texts(content: object, where: str) -> list[str]:
    """The texts of blocks."""
    if not isinstance(content, list):
        raise wrong_type(where, "a string or a list of blocks", content)
    return [_text_of(_block(block, f"{where}[{i}]"), f"{where}[{i}]") for i, block in enumerate(content)]


def _block(block: object, where: str) -> Json:
    if not isinstance(block, dict):
        raise wrong_type(where, "an object", block)
    return block


def _text_of(block: Json, where: str) -> str:
    """The text of a block that must have one."""
    match block.get("type"):
        case "text":
            return required_text(block, "text", where)
        case "search_result":
            parts = _texts(block.get("content"), f"{where}.content")
            return "\n".join([required_text(block, "title", where), *parts])
        case "tool_reference":  # of a client's search for tools, all of which the model knows here
            return f"The tool {required_text(block, 'tool_name', where, MOST_ID)} is available."
        case kind:
            raise _refused(kind, where, "text")


def _refused(kind: object, where: str, known: str) -> ApiError:
    field = f"{where}.type"
    if kind == IMAGE:
        message = f"{field} is image: pictures are read in messages of the user and in results of tools"
    elif isinstance(kind, str) and kind in MEDIA:
        message = f"{field} is {kind}, but this server reads texts and pictures: it takes no {MEDIA[kind]}"
    elif isinstance(kind, str) and (kind in THEIRS or kind.endswith(THEIR_RESULT)):
        message = f"{field} is {short(kind)}: this server runs no tools itself; leave such blocks out"
        return ApiError(message, field, "unsupported_parameter")
    else:
        message = f"{field} must be {known}, not {short(kind)}"
    return ApiError(message, field, "invalid_value")


class _Conversation:
    """Adds messages and joins neighbours of the same role, as Anthropic does."""

    def __init__(self, loaded: Loaded) -> None:
        self.messages: list[Json] = []
        self._loaded = loaded

    def add(self, message: object, where: str) -> None:
        """Add the next message."""
        if not isinstance(message, dict):
            raise wrong_type(where, "an object", message)
        role, content = message.get("role"), message.get("content")
        if role is None:
            raise ApiError(f"{where}.role is missing", f"{where}.role", "missing_required_parameter")
        if role not in ROLES:
            raise ApiError(f"{where}.role must be {', '.join(ROLES)}", f"{where}.role", "invalid_value")
        if content is None:
            raise ApiError(f"{where}.content is missing", f"{where}.content", "missing_required_parameter")
        if isinstance(content, str):
            (self._told if role == "system" else partial(self.add_text, role))(content)
            return
        if not isinstance(content, list):
            raise wrong_type(f"{where}.content", "a string or a list of blocks", content)
        if not content and role != "system":
            self.add_text(role, "")
        add: Mapping[str, Callable[[Json, str], None]] = {"assistant": self._answered, "user": self._asked}
        for i, block in enumerate(content):
            place = f"{where}.content[{i}]"
            if role == "system":
                self._told(_text_of(_block(block, place), place))
            else:
                add[role](_block(block, place), place)

    def add_text(self, role: str, text: str, between: str = "\n") -> None:
        """Add text to the last message, if it has this role, or in a new one."""
        last = self._last(role)
        before = last.get("content")
        if isinstance(before, list):
            if before[-1].get("type") == "text":
                before[-1]["text"] += f"{between}{text}"
            elif text:
                before.append({"type": "text", "text": text})
        else:
            last["content"] = f"{before}{between}{text}" if before else text

    def _add_picture(self, part: Part) -> None:
        """Add a picture to the user's message."""
        last = self._last("user")
        content = last.get("content")
        if not isinstance(content, list):
            last["content"] = content = [{"type": "text", "text": content}] if content else []
        content.append(part)

    def _told(self, text: str) -> None:
        """Add what a system message says: many templates have one at the beginning only, so that a later one
        becomes a marked part of the user's message."""
        if self.messages and self.messages[-1]["role"] != "system":
            self.add_text("user", LATER.format(text))
        else:
            self.add_text("system", text)

    def _last(self, role: str) -> Json:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role})
        return self.messages[-1]

    def _asked(self, block: Json, where: str) -> None:
        if block.get("type") == "tool_result":
            self.messages.append(_result(block, where, self._loaded))
        elif block.get("type") == IMAGE:
            self._add_picture(_picture(block, where, self._loaded))
        elif block.get("type") in ("text", "search_result", *MEDIA):
            self.add_text("user", _text_of(block, where))
        else:
            raise _refused(block.get("type"), where, "text, image or tool_result")

    def _answered(self, block: Json, where: str) -> None:
        match block.get("type"):
            case "text":
                self.add_text("assistant", required_text(block, "text", where), GAP)
            case "tool_use":
                calls = self._last("assistant").setdefault("tool_calls", [])
                assert isinstance(calls, list)
                calls.append(_call(block, where))
            case "thinking":
                last = self._last("assistant")
                thought = required_text(block, "thinking", where) or thought_of(block.get("signature"))
                before = last.get("reasoning_content")
                last["reasoning_content"] = f"{before}{GAP}{thought}" if before else thought
                last.setdefault("content", "")
            case "redacted_thinking":  # encrypted by Anthropic
                self._last("assistant").setdefault("content", "")
            case kind:
                raise _refused(kind, where, "text, tool_use or thinking")


def _picture(block: Json, where: str, loaded: Loaded) -> Part:
    """A block with a picture: in base64, or at an address."""
    field = f"{where}.source"
    source = block.get("source")
    if not isinstance(source, dict):
        raise wrong_type(field, "an object", source)
    match source.get("type"):
        case "base64":
            return from_base64(source.get("data"), f"{field}.data")
        case "url":
            return from_url(required_text(source, "url", field), f"{field}.url", loaded)
        case "file":
            message = f"{field}.type is file: this server keeps no files; send the picture in base64"
            raise ApiError(message, f"{field}.type", "unsupported_parameter")
        case kind:
            message = f"{field}.type must be base64 or url, not {short(kind)}"
            raise ApiError(message, f"{field}.type", "invalid_value")


def _contents(content: object, where: str, loaded: Loaded) -> list[str | Part]:
    """The texts and pictures of blocks."""
    if not isinstance(content, list):
        raise wrong_type(where, "a string or a list of blocks", content)
    found: list[str | Part] = []
    for i, given in enumerate(content):
        block, place = _block(given, f"{where}[{i}]"), f"{where}[{i}]"
        is_picture = block.get("type") == IMAGE
        found.append(_picture(block, place, loaded) if is_picture else _text_of(block, place))
    return found


def _result(block: Json, where: str, loaded: Loaded) -> Json:
    """The result of a call."""
    call_id = required_text(block, "tool_use_id", where, MOST_ID)
    content = block.get("content")
    if content is None:
        content = ""
    parts = [content] if isinstance(content, str) else _contents(content, f"{where}.content", loaded)
    failed = block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        raise wrong_type(f"{where}.is_error", "true or false", failed)
    if failed:
        first, *others = parts if parts and isinstance(parts[0], str) else ["", *parts]
        if not str(first).lower().startswith(SAYS_SO):
            parts = [f"{FAILED}{first}", *others]
    return {"role": "tool", "tool_call_id": call_id, "content": content_of(parts, "\n")}


def _call(block: Json, where: str) -> Json:
    """A call, with its arguments as an object."""
    arguments = block.get("input")
    if arguments is None:
        raise ApiError(f"{where}.input is missing", f"{where}.input", "missing_required_parameter")
    if not isinstance(arguments, dict):
        raise wrong_type(f"{where}.input", "an object", arguments)
    function = {"name": required_text(block, "name", where, MOST_ID), "arguments": arguments}
    return {"type": "function", "id": required_text(block, "id", where, MOST_ID), "function": function}
