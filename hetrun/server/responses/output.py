"""The answer to a request for a response: whole, or as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass

from hetrun.client.events import Event, Message as Said, TokenLogprob, Usage
from hetrun.server import logprobs
from hetrun.server.errors import ApiError
from hetrun.server.json_stream import json_text
from hetrun.server.request import Order
from hetrun.server.response_driver import Json, finish_reason, pieces_of, prompt_progress
from hetrun.server.responses.items import Call, Item, Message, NumberedEvents, Reasoning, with_list
from hetrun.server.sse import NamedEvents
from hetrun.server.usage import timings_of
from hetrun.text.tool_parsers.parts import GAP, Arguments, CallStart, Piece, Prose, Thought

# OpenAI's codes for a failed response; any other error is the prompt's.
CODES = {"server_error": "server_error", "rate_limit_error": "rate_limit_exceeded"}

Keep = Callable[[bytes, Said], None]  # called with a complete response and its message


@dataclass(frozen=True)
class Head:
    """The fields of a response that don't change."""

    fields: Json

    def text(self, status: str, output: Sequence[str] = (), **more: object) -> str:
        """The response as JSON."""
        return with_list(self.fields | {"status": status} | more, "output", output)


class ResponseOutput:
    """The contents of a response, as they arrive."""

    def __init__(self, order: Order, telling: NumberedEvents) -> None:
        self._reader = order.reading.reader() if order.reading else None
        self._telling = telling
        self._items: list[Item] = []
        self._scores: list[str] = []  # of tokens whose text is not certain yet
        self._tokens = 0
        self._thought = 0  # how many of them were reasoning

    def observe(self, event: Event) -> None:
        """Add an event."""
        if event.kind == "token":
            self._tokens += 1
            if event.logprob is not None:
                self._scores.append(json_text(entry(event.logprob)))
        for piece in self._pieces(event):
            self._take(piece)

    def finish(self, head: Head, end: Event) -> str:
        """The finished response as JSON, complete or not."""
        if self._scores and self._items and isinstance(self._items[-1], Message):
            self._add("")
        if not self._items:
            self._begin(Message(0))
        status = "incomplete" if finish_reason(end) == "length" else "completed"
        self._close(status)
        more: Json = {"usage": usage(end.usage, self._thought), "timings": timings_of(end)}
        if status == "completed":
            more["completed_at"] = int(time.time())
        else:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        body = head.text(status, [item.json() for item in self._items], **more)
        self._telling.tell(f"response.{status}", {}, response=body)
        return body

    def said(self) -> Said:
        """The answer as a message of a conversation."""
        calls = [
            {
                "type": "function",
                "id": item.call_id,
                "function": {"name": item.name, "arguments": item.text},
            }
            for item in self._items
            if isinstance(item, Call)
        ]
        texts = GAP.join(item.text for item in self._items if isinstance(item, Message))
        thoughts = GAP.join(item.text for item in self._items if isinstance(item, Reasoning))
        message: Json = {"role": "assistant"}
        if texts or not calls:
            message["content"] = texts
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = thoughts
        return message

    def _pieces(self, event: Event) -> list[Piece]:
        if self._reader:
            return pieces_of(self._reader, event)
        return [Prose(event.text)] if event.text else []

    def _take(self, piece: Piece) -> None:
        match piece:
            case CallStart(_, name):
                # The reader has begun a call, so there is one.
                self._begin(Call(len(self._items), name, self._reader.new_id() if self._reader else ""))
                self._scores.clear()
                return
            case Prose():
                text = self._continued(Message, piece.text)
            case Thought():
                text = self._continued(Reasoning, piece.text)
            case Arguments():
                text = piece.text
        self._add(text)

    def _continued(self, kind: type[Message | Reasoning], text: str) -> str:
        """Add text to an item of its kind; starts a new item if the last one is of another kind."""
        if self._items and isinstance(self._items[-1], kind):
            return text
        follows = bool(self._items)
        self._begin(kind(len(self._items)))
        return text.removeprefix(GAP) if follows else text

    def _begin(self, item: Item) -> None:
        self._close("completed")
        self._items.append(item)
        item.begin(self._telling)

    def _add(self, text: str) -> None:
        """Keep the log-probabilities of text; those of calls and reasoning are not returned."""
        self._items[-1].add(self._telling, text, self._scores)
        self._scores.clear()

    def _close(self, status: str) -> None:
        if not self._items:
            return
        last = self._items[-1]
        if isinstance(last, Reasoning):
            self._thought = self._tokens
        last.end(self._telling, status)


def entry(scored: TokenLogprob) -> Json:
    """A token with its log-probability; special tokens have no bytes."""
    found = logprobs.entry(scored)
    return found if scored.piece is not None else found | {"bytes": []}


def usage(counted: Usage, thought: int) -> Json:
    """OpenAI's object; it reports no cache writes, since every prompt is cached at no cost."""
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counted.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
    }


class ResponseWriter:
    """A response, whole or in pieces."""

    def __init__(self, order: Order, *, head: Head, keep: Keep) -> None:
        self._head = head
        self._keep = keep
        self._telling = NumberedEvents(order.stream)
        self._output = ResponseOutput(order, self._telling)
        self._begun = ""
        self._body = b""

    def add(self, index: int, event: Event) -> None:
        self._output.observe(event)
        if event.kind == "done":
            self._body = self._output.finish(self._head, event).encode()
            self._keep(self._body, self._output.said())

    def answer(self) -> bytes:
        return self._body

    def write(self, index: int, event: Event) -> list[str]:
        if not self._begun:
            self._begin()
        if event.progress:
            said: Json = {"prompt_progress": prompt_progress(event.progress)}
            self._telling.tell("response.in_progress", said, response=self._begun)
        else:
            self.add(index, event)
        return self._telling.taken()

    def end(self) -> Iterator[str]:
        return iter(())

    def response(self, texts: AsyncGenerator[str, None]) -> ResponseEvents:
        return ResponseEvents(texts, self)

    def failed(self, error: ApiError) -> list[str]:
        """The last events after an error: OpenAI sends the error, then the failed response."""
        said = error.error
        self._telling.tell("error", {name: said[name] for name in ("code", "message", "param")})
        code = CODES.get(str(said["type"]), "invalid_prompt")
        failed = self._head.text("failed", error={"code": code, "message": said["message"]})
        self._telling.tell("response.failed", {}, response=failed)
        return self._telling.taken()

    def _begin(self) -> None:
        self._begun = self._head.text("in_progress")
        self._telling.tell("response.created", {}, response=self._begun)
        self._telling.tell("response.in_progress", {}, response=self._begun)


class ResponseEvents(NamedEvents):
    """The events of a streamed response."""

    def __init__(self, texts: AsyncGenerator[str, None], writer: ResponseWriter) -> None:
        super().__init__(texts)
        self._writer = writer

    def failed(self, error: ApiError) -> bytes:
        """The last events, after an error."""
        return b"".join(map(self.framed, self._writer.failed(error)))
