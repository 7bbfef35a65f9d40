"""Chats: messages become a request, and the events of its answer become chunks and a completion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from hetrun.api.keywords import SamplingKeywords
from hetrun.api.pictures import without_pictures
from hetrun.client.completion import ChatChunk, Completion, EndReason, ToolCall, completion
from hetrun.client.events import PICTURE, Event, GenerateRequest, Message, ModelInfo
from hetrun.client.pictures import check_reads
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings
from hetrun.errors import OptionError
from hetrun.text.answers.reading import AnswerFormat, ReadingOptions, parts, reading
from hetrun.text.answers.tools import read_tools
from hetrun.text.chat import continuation
from hetrun.text.chat.messages import ROLES, checked_messages, plain
from hetrun.text.tool_parsers.parts import Arguments, CallStart, Piece, Prose, Thought


class ChatKeywords(SamplingKeywords, total=False):
    """Keywords of `chat` besides `stream`, for type checkers and editors; see `LLM.chat`."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    template_options: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """A chat's options for tools, in OpenAI's terms."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel: bool = True


Chat = str | Sequence[Message]
# Not Sequence[str], which a single text is, too.
Chats = list[str] | tuple[str, ...] | Sequence[Sequence[Message]]


def conversations(messages: object) -> tuple[list[Chat], bool]:
    """The conversations, and whether there are several: their list is one of texts, or of lists."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        return [cast(Chat, messages)], False
    if any(isinstance(item, Mapping) for item in messages):
        return [cast(Chat, messages)], False
    texts = [isinstance(item, str) for item in messages]
    if all(texts) or not any(texts):
        return [cast(Chat, item) for item in messages], True
    raise OptionError(
        "messages is one conversation (a text, or a list of messages), or a list of several: all of them "
        "texts, or all of them lists of messages"
    )


class CheckedMessages(NamedTuple):
    """Checked messages, which have places for pictures, and the pictures."""

    messages: tuple[dict[str, Any], ...]
    pictures: tuple[bytes, ...] = ()


def chat_messages(messages: str | Sequence[Message]) -> CheckedMessages:
    """The checked messages; a string is one message from the user."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    said, pictures = without_pictures(messages)
    # What checks them knows texts only, so each message's places are put back afterwards.
    checked = (
        checked_messages([_texts_of(message) for message in said]) if pictures else checked_messages(messages)
    )
    placed = (
        [_with_places(i, *pair) for i, pair in enumerate(zip(checked, said, strict=True))]
        if pictures
        else checked
    )
    return CheckedMessages(tuple(_with_known_role(i, message) for i, message in enumerate(placed)), pictures)


def _is_place(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == PICTURE


def _places(message: Any) -> bool:  # noqa: ANN401 - not checked yet
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(map(_is_place, content))


def _texts_of(message: Any) -> Any:  # noqa: ANN401 - not checked yet
    """A message without its places for pictures."""
    if not _places(message):
        return message
    return {**message, "content": [part for part in message["content"] if not _is_place(part)]}


def _with_places(i: int, checked: dict[str, Any], given: Any) -> dict[str, Any]:  # noqa: ANN401
    """A checked message with the parts that it came with."""
    if not _places(given):
        return checked
    return {**checked, "content": plain(f"messages[{i}].content", given["content"])}


def _with_known_role(i: int, message: dict[str, Any]) -> dict[str, Any]:
    role = message["role"]
    if role not in ROLES:
        raise OptionError(f"messages[{i}].role must be one of {', '.join(ROLES)}, not {role!r}")
    return {**message, "role": ROLES[role]}


def chat_request(
    said: CheckedMessages,
    params: SamplingParams,
    *,
    about_tools: ToolOptions,
    template_options: Mapping[str, object] | None,
    info: ModelInfo,
    settings: Settings,
) -> tuple[GenerateRequest, AnswerFormat]:
    """The engine's request for checked messages, and the parser of its answer."""
    check_reads(info, said.pictures)
    tools = read_tools(about_tools.tools, about_tools.tool_choice, parallel=about_tools.parallel)
    structure = params.structure
    if tools.all and structure and structure.kind != "json_schema":
        raise OptionError(f"{structure.kind} and tools are both given: an answer cannot follow both")
    reads = ReadingOptions(
        settings.tool_parser, settings.reasoning_format, info.tool_format, info.thought_mark
    )
    options = dict(template_options or {})
    resumed = bool(options.get(continuation.OPTION))
    how = reading(tools, reads, has_form=structure is not None, resumed=resumed)
    schema = structure.text if structure and structure.kind == "json_schema" else None
    thinks = options.get("enable_thinking") is not False
    request = GenerateRequest(
        params,
        messages=said.messages,
        pictures=said.pictures,
        template_options=options,
        tools=tuple(tool.given for tool in tools.all),
        parts=parts(how, schema, has_form=structure is not None, thinks=thinks),
    )
    return request, how


class ChatReader:
    """Reads the events of one answer."""

    def __init__(self, how: AnswerFormat) -> None:
        self._reader = how.reader()
        self._events: list[Event] = []
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._begun: tuple[str, list[str]] | None = None  # a call's name, and its arguments so far

    def read(self, event: Event) -> ChatChunk | None:
        """The event's addition to the answer; None: nothing yet."""
        self._events.append(event)
        pieces = self._reader.push(
            event.text,
            opened=bool(event.opened),
            last=event.kind == "done",
            cut=event.finish_reason == "length",
        )
        chunk = self._chunk(pieces)
        if event.kind == "done":
            if self._begun:
                chunk = replace(chunk, tool_calls=(*chunk.tool_calls, self._complete()))
            whole = self._completion()
            return replace(chunk, finish_reason=whole.finish_reason, usage=whole.usage, completion=whole)
        return chunk if chunk.text or chunk.reasoning or chunk.tool_calls else None

    def _chunk(self, pieces: Iterable[Piece]) -> ChatChunk:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for piece in pieces:
            if self._begun and not isinstance(piece, Arguments):
                calls.append(self._complete())
            match piece:
                case Prose(text):
                    texts.append(text)
                case Thought(text):
                    reasoning.append(text)
                case CallStart(_, name):
                    self._begun = (name, [])
                case Arguments(_, text) if self._begun:
                    self._begun[1].append(text)
        self._texts += texts
        self._reasoning += reasoning
        return ChatChunk("".join(texts), "".join(reasoning), tuple(calls))

    def _complete(self) -> ToolCall:
        """The finished call."""
        assert self._begun is not None
        name, arguments = self._begun
        self._begun = None
        self._calls.append(ToolCall(self._reader.new_id(), name, "".join(arguments)))
        return self._calls[-1]

    def _completion(self) -> Completion:
        whole = completion(self._events)
        # An answer that was cut off says so, even if it has calls.
        calls_end_it = whole.finish_reason == "stop" and self._calls
        reason: EndReason = "tool_calls" if calls_end_it else whole.finish_reason
        return replace(
            whole,
            text="".join(self._texts),
            reasoning="".join(self._reasoning),
            tool_calls=list(self._calls),
            finish_reason=reason,
        )


def read_chat(events: Iterable[Event], how: AnswerFormat) -> Completion:
    """The events of a finished answer as one object."""
    reader = ChatReader(how)
    found = [chunk.completion for event in events if (chunk := reader.read(event)) and chunk.completion]
    return found[-1]
