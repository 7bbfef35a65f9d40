"""The answer to a request for a response: whole, or as the events of a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from hetrun.client.events import Event, Message as Said, TokenLogprob, Usage
from hetrun.server import logprobs
from hetrun.server.errors import ApiError
from hetrun.server.json_stream import json_text
from hetrun.server.request import Order
from hetrun.server.response_driver import Events, Json, finish_reason, pieces_of, prompt_progress
from hetrun.server.responses.items import Call, Item, Message, Reasoning, Telling, with_list
from hetrun.server.usage import Counts
from hetrun.text.tool_parsers.parts import GAP, Arguments, Begin, Piece, Text, Thought

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


class Output:
    """The contents of a response, as they arrive."""

    def __init__(self, order: Order, telling: Telling) -> None:
        self._reader = order.reading.reader() if order.reading else None
        self._telling = telling
        self._items: list[Item] = []
        self._scores: list[str] = []  # of tokens whose text is not certain yet
        self._tokens = 0
        self._thought = 0  # how many of them were reasoning

    def saw(self, event: Event) -> None:
        """Add an event."""
        if event.kind == "token":
            self._tokens += 1
            if event.logprob is not None:
                self._scores.append(json_text(entry(event.logprob)))
        for piece in self._pieces(event):
            self._take(piece)

    def ended(self, head: Head, end: Event) -> str:
        """The finished response as JSON, complete or not."""
        if self._scores and self._items and isinstance(self._items[-1], Message):
            self._add("")
        if not self._items:
            self._begin(Message(0))
        status = "incomplete" if finish_reason(end) == "length" else "completed"
        self._close(status)
        counts = Counts(1)
        counts.ended(0, end)
        more: Json = {"usage": usage(end.usage, self._thought), "timings": counts.timings()}
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
        return [Text(event.text)] if event.text else []

    def _take(self, piece: Piece) -> None:
        match piece:
            case Begin(_, name):
                # The reader has begun a call, so there is one.
                self._begin(Call(len(self._items), name, self._reader.new_id() if self._reader else ""))
                self._scores.clear()
                return
            case Text():
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


async def whole(head: Head, order: Order, events: Events, keep: Keep) -> bytes:
    """The response in one piece."""
    output, body = Output(order, Telling(False)), b""
    async with aclosing(events):
        async for _, event in events:
            if event.kind == "error":
                raise order.failure(event.error)
            output.saw(event)
            if event.kind == "done":
                body = output.ended(head, event).encode()
                keep(body, output.said())
            await asyncio.sleep(0)  # all events may already be here; give other requests a turn
    return body


async def chunks(head: Head, order: Order, events: Events, keep: Keep) -> AsyncGenerator[str, None]:
    """The response in pieces."""
    telling = Telling(True)
    output, begun = Output(order, telling), head.text("in_progress")
    telling.tell("response.created", {}, response=begun)
    telling.tell("response.in_progress", {}, response=begun)
    async with aclosing(events):
        async for _, event in events:
            if event.kind == "error":
                _fail(telling, head, order.failure(event.error))
            elif event.progress:
                said: Json = {"prompt_progress": prompt_progress(event.progress)}
                telling.tell("response.in_progress", said, response=begun)
            else:
                output.saw(event)
            if event.kind == "done":
                keep(output.ended(head, event).encode(), output.said())
            for told in telling.taken():
                yield told


def _fail(telling: Telling, head: Head, error: ApiError) -> None:
    """The last events after an error: OpenAI sends the error, then the failed response."""
    said = error.error
    telling.tell("error", {name: said[name] for name in ("code", "message", "param")})
    code = CODES.get(str(said["type"]), "invalid_prompt")
    failed = head.text("failed", error={"code": code, "message": said["message"]})
    telling.tell("response.failed", {}, response=failed)
