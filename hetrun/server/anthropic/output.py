"""The answer to a request for a message: whole, or as the events of a stream."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator

from hetrun.client.events import Event, Usage
from hetrun.server.anthropic.signature import signature_of
from hetrun.server.anthropic_format.errors import PATH
from hetrun.server.errors import ApiError
from hetrun.server.json_stream import json_text
from hetrun.server.request import Order
from hetrun.server.response_driver import Json, pieces_of
from hetrun.server.sse import NamedEvents
from hetrun.server.usage import timings_of
from hetrun.text.tool_parsers.parts import GAP, Arguments, CallStart, Piece, Prose, Thought

PING = json_text({"type": "ping"})


def event(kind: str, **fields: object) -> str:
    """An event of a stream."""
    return f"event: {kind}\ndata: {json_text({'type': kind} | fields)}"


class MessageEvents(NamedEvents):
    """The events of a streamed message."""

    def failed(self, error: ApiError) -> bytes:
        """The last event, after an error."""
        return self.framed(f"event: error\ndata: {json_text(error.body(PATH))}")


class ContentBlock(ABC):
    """A block of the answer, as it arrives."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All of its text; of a call its arguments."""
        return "".join(self._texts)

    def add(self, text: str) -> Json | None:
        """Add text; returns the delta, if there is one to send."""
        self._texts.append(text)
        return self.delta(text) if text else None

    @abstractmethod
    def begin(self) -> Json:
        """The empty block."""

    @abstractmethod
    def delta(self, text: str) -> Json | None:
        """More of it."""

    @abstractmethod
    def json(self) -> Json:
        """The complete block."""


class TextBlock(ContentBlock):
    """Text for people."""

    def begin(self) -> Json:
        return {"type": "text", "text": ""}

    def delta(self, text: str) -> Json | None:
        return {"type": "text_delta", "text": text}

    def json(self) -> Json:
        return {"type": "text", "text": self.text}


class ThinkingBlock(ContentBlock):
    """Reasoning, which may be left out of the answer."""

    def __init__(self, omitted: bool) -> None:
        super().__init__()
        self._omitted = omitted

    @property
    def signature(self) -> str:
        """Its signature, when it is complete."""
        return signature_of(self.text, omitted=self._omitted)

    def begin(self) -> Json:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def delta(self, text: str) -> Json | None:
        return None if self._omitted else {"type": "thinking_delta", "thinking": text}

    def json(self) -> Json:
        thinking = "" if self._omitted else self.text
        return {"type": "thinking", "thinking": thinking, "signature": self.signature}


class CallBlock(ContentBlock):
    """A call of a tool."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._head: Json = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name}

    def begin(self) -> Json:
        return self._head | {"input": {}}

    def delta(self, text: str) -> Json | None:
        return {"type": "input_json_delta", "partial_json": text}

    def json(self) -> Json:
        """Arguments that were cut off, or are no object, are left out: `input` must be an object."""
        try:
            found = json.loads(self.text or "{}")
        except (ValueError, RecursionError):
            found = {}
        return self._head | {"input": found if isinstance(found, dict) else {}}


class MessageOutput:
    """The contents of a message, as they arrive."""

    def __init__(self, order: Order, *, omits_thoughts: bool) -> None:
        self._order = order
        self._omits = omits_thoughts
        self._reader = order.reading.reader() if order.reading else None
        self._blocks: list[ContentBlock] = []
        self._events: list[str] = []
        self._tokens = 0
        self._thought = 0  # how many of them were reasoning
        self.head: Json = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": order.info.id,
        }

    def begin(self, prompt: Usage) -> str:
        """The first event."""
        message = self.head | {"content": [], "stop_reason": None, "stop_sequence": None}
        return event("message_start", message=message | {"usage": usage(prompt)})

    def observe(self, found: Event) -> list[str]:
        """Add an event of the engine; returns events of the stream."""
        self._tokens += found.kind == "token"
        for piece in self._pieces(found):
            self._take(piece)
        return self._taken()

    def finish(self, end: Event) -> tuple[list[str], Json]:
        """The last events, and the whole message."""
        self._close()
        stopped: Json = {"stop_reason": self._reason(end), "stop_sequence": end.stopped or None}
        used, timings = usage(end.usage, self._thought), timings_of(end)
        last = event("message_delta", delta=stopped, usage=used, timings=timings)
        content = [block.json() for block in self._blocks]
        message = self.head | {"content": content} | stopped | {"usage": used, "timings": timings}
        return [*self._taken(), last, event("message_stop")], message

    def _pieces(self, found: Event) -> list[Piece]:
        if self._reader:
            return pieces_of(self._reader, found)
        return [Prose(found.text)] if found.text else []

    def _take(self, piece: Piece) -> None:
        match piece:
            case CallStart(_, name):
                self._begin(CallBlock(name))
            case Prose():
                self._add(piece.text, isinstance(self._last, TextBlock) or self._begin(TextBlock()))
            case Thought():
                same = isinstance(self._last, ThinkingBlock)
                self._add(piece.text, same or self._begin(ThinkingBlock(self._omits)))
            case Arguments():
                self._add(piece.text, True)

    @property
    def _last(self) -> ContentBlock | None:
        return self._blocks[-1] if self._blocks else None

    def _begin(self, block: ContentBlock) -> bool:
        """Begin a block after the last one; returns False, since it does not go on."""
        self._close()
        self._events.append(
            event("content_block_start", index=len(self._blocks), content_block=block.begin())
        )
        self._blocks.append(block)
        return False

    def _add(self, text: str, goes_on: bool) -> None:
        text = text if goes_on or len(self._blocks) == 1 else text.removeprefix(GAP)
        if delta := self._blocks[-1].add(text):
            self._events.append(event("content_block_delta", index=len(self._blocks) - 1, delta=delta))

    def _close(self) -> None:
        last, index = self._last, len(self._blocks) - 1
        if last is None:
            return
        if isinstance(last, ThinkingBlock):
            self._thought = self._tokens
            signed = {"type": "signature_delta", "signature": last.signature}
            self._events.append(event("content_block_delta", index=index, delta=signed))
        self._events.append(event("content_block_stop", index=index))

    def _taken(self) -> list[str]:
        taken, self._events = self._events, []
        return taken

    def _reason(self, end: Event) -> str:
        if end.stopped:
            return "stop_sequence"
        if end.finish_reason == "length":
            limit = self._order.prompts[0].most_tokens
            full = limit is None or end.usage.completion_tokens < limit
            return "model_context_window_exceeded" if full else "max_tokens"
        return "tool_use" if any(isinstance(block, CallBlock) for block in self._blocks) else "end_turn"


def usage(counted: Usage, thought: int = 0) -> Json:
    """Anthropic's object. Caching costs nothing, so that no tokens are counted as written to the cache."""
    return {
        "input_tokens": counted.prompt_tokens - counted.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached_tokens,
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"thinking_tokens": thought},
    }


class MessageWriter:
    """A message, whole or as the events of a stream: it begins when the prompt does; a ping follows each part
    of the prompt."""

    def __init__(self, order: Order, *, omits_thoughts: bool) -> None:
        self._output = MessageOutput(order, omits_thoughts=omits_thoughts)
        self._begun = False
        self._message: Json = {}

    def add(self, index: int, event: Event) -> None:
        self._output.observe(event)
        if event.kind == "done":
            self._message = self._output.finish(event)[1]

    def answer(self) -> Json:
        return self._message

    def write(self, index: int, event: Event) -> Iterator[str]:
        if not self._begun:
            yield self._output.begin(_prompt_usage(event))
        if not self._begun or event.kind == "prompt":
            yield f"event: ping\ndata: {PING}"
        self._begun = True
        yield from self._output.observe(event)
        if event.kind == "done":
            yield from self._output.finish(event)[0]

    def end(self) -> Iterator[str]:
        return iter(())

    def response(self, texts: AsyncGenerator[str, None]) -> MessageEvents:
        return MessageEvents(texts)


def _prompt_usage(first: Event) -> Usage:
    """What is known of the prompt with the first event."""
    if first.progress:
        return Usage(first.progress.total, 0, first.progress.cached)
    return first.usage if first.kind == "done" else Usage()
