"""Ollama's messages, converted to those of a chat in OpenAI's format."""

from __future__ import annotations

from collections import deque

from hetrun.client.events import Message
from hetrun.server import chat
from hetrun.server.errors import wrong_type
from hetrun.server.fields import Body
from hetrun.server.ollama.options import Json
from hetrun.server.pictures.parts import Part, content_of, from_base64
from hetrun.text.chat.messages import ROLES


def messages(body: Body) -> tuple[Message, ...]:
    """The conversation. Calls and their results are matched by their order where they have no ids."""
    given = body.get("messages")
    if not isinstance(given, list):
        raise wrong_type("messages", "a list", given)
    pending: deque[tuple[str, str]] = deque()  # names and ids of calls that have no result yet
    said = [_message(one, f"messages[{i}]", i, pending) for i, one in enumerate(given)]
    read = chat.messages({"messages": said})
    return tuple(
        with_images(one, images_of(asked, f"messages[{i}]."))
        for i, (one, asked) in enumerate(zip(read, given, strict=True))
    )


def images_of(values: Body, where: str = "") -> list[Part]:
    """The pictures of a message, or of a prompt."""
    given, field = values.get("images"), f"{where}images"
    if given is None:
        return []
    if not isinstance(given, list):
        raise wrong_type(field, "a list of strings in base64", given)
    return [from_base64(image, f"{field}[{i}]") for i, image in enumerate(given)]


def with_images(message: Message, images: list[Part]) -> Message:
    """A message with pictures before its text, where Ollama puts them."""
    if not images:
        return message
    text = message.get("content")
    return {**message, "content": content_of([*images, *([str(text)] if text else [])], "")}


def _message(given: object, where: str, number: int, pending: deque[tuple[str, str]]) -> Json:
    if not isinstance(given, dict):
        raise wrong_type(where, "an object", given)
    role = given.get("role")
    if isinstance(role, str) and role.lower() in ROLES:
        role = role.lower()
    said: Json = {"role": role, "content": given.get("content")}
    if role == "assistant":
        said["reasoning_content"] = given.get("thinking") or None
        said["tool_calls"] = _calls(given.get("tool_calls"), number, pending)
    elif role == "tool":
        name = given.get("tool_name") or given.get("name")
        said["name"], said["tool_call_id"] = name, given.get("tool_call_id") or _answered(name, pending)
    if said["content"] is None and not said.get("tool_calls"):
        said["content"] = ""
    return said


def _calls(given: object, number: int, pending: deque[tuple[str, str]]) -> object:
    """An assistant's calls with ids; nine letters and digits, because Mistral's templates demand that."""
    if not isinstance(given, list):
        return given
    calls = []
    for i, call in enumerate(given):
        if not isinstance(call, dict):
            calls.append(call)
            continue
        function, call_id = call.get("function"), call.get("id") or f"c{number % 10**5:05d}{i % 10**3:03d}"
        if isinstance(function, dict):
            arguments = function.get("arguments")
            function = {"name": function.get("name"), "arguments": {} if arguments is None else arguments}
            pending.append((str(function["name"]), str(call_id)))
        calls.append({"type": "function", "id": call_id, "function": function})
    return calls


def _answered(name: object, pending: deque[tuple[str, str]]) -> str:
    """The id of the call that a result belongs to: the first with its name, else the first."""
    for call in pending:
        if call[0] == name:
            pending.remove(call)
            return call[1]
    return pending.popleft()[1] if pending else "c00000000"
