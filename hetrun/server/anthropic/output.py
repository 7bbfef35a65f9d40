"""The message that answers: whole, or as the events of a stream."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing

from hetrun.client.events import Event, Usage
from hetrun.server.anthropic.messages import Json
from hetrun.server.anthropic.request import Asked
from hetrun.server.errors import MESSAGES, ApiError
from hetrun.server.json_stream import json_text
from hetrun.server.response_driver import Events, finish_reason, pieces_of
from hetrun.server.sse import NamedEvents
from hetrun.text.tool_parsers.parts import GAP, Arguments, Begin, Piece, Text, Thought

CALL_ID = "toolu_"
# Clients send it back with a block of reasoning, and the SDKs require one. Nothing is signed here.
SIGNATURE = "unsigned"
PING = 'event: ping\ndata: {"type":"ping"}'


class MessageEvents(NamedEvents):
    """A stream in which an error in the middle is an event too."""

    def failed(self, error: ApiError) -> bytes:
        """The event for it."""
        return self.framed(_event("error", error.body(MESSAGES)))


class Block:
    """One block of the answer's content; `text` is that of its deltas."""

    def __init__(self, kind: str, name: str = "", call_id: str = "") -> None:
        self.kind = kind  # text, thinking or tool_use
        self.name = name
        self.call_id = call_id
        self.texts: list[str] = []

    def begun(self) -> Json:
        """The block as a stream begins it."""
        match self.kind:
            case "text":
                return {"type": "text", "text": ""}
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": {}}

    def delta(self, text: str) -> Json:
        """More of it."""
        match self.kind:
            case "text":
                return {"type": "text_delta", "text": text}
            case "thinking":
                return {"type": "thinking_delta", "thinking": text}
        return {"type": "input_json_delta", "partial_json": text}

    def json(self) -> Json:
        """All of it."""
        text = "".join(self.texts)
        match self.kind:
            case "text":
                return {"type": "text", "text": text}
            case "thinking":
                return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
        return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": _arguments(text)}


class Output:
    """The content of a message, as it arrives."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._reader = asked.order.reading.reader() if asked.order.reading else None
        self._id = f"msg_{secrets.token_hex(12)}"
        self._told: list[str] = []
        self.blocks: list[Block] = []

    def message(self, content: list[Json], reason: str | None, stop: str | None, usage: Usage) -> Json:
        """The message with this content."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._asked.order.info.id,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage_of(usage),
        }

    def begin(self, prompt: Usage) -> None:
        """The first event, with what is known of the prompt."""
        self._tell("message_start", message=self.message([], None, None, prompt))

    def saw(self, event: Event) -> None:
        """Add an event."""
        for piece in self._pieces(event):
            self._take(piece)

    def ended(self, end: Event) -> Json:
        """The finished message."""
        self._close()
        reason, stop = self._reason(end)
        usage = usage_of(end.usage)
        self._tell("message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=usage)
        self._tell("message_stop")
        return self.message([block.json() for block in self.blocks], reason, stop, end.usage)

    def taken(self) -> list[str]:
        """The events since the last call."""
        told, self._told = self._told, []
        return told

    def _reason(self, end: Event) -> tuple[str, str | None]:
        if finish_reason(end) == "length":
            return "max_tokens", None
        if self._reader and self._reader.calls:
            return "tool_use", None
        return ("stop_sequence", end.stopped) if end.stopped else ("end_turn", None)

    def _pieces(self, event: Event) -> list[Piece]:
        if self._reader:
            return pieces_of(self._reader, event)
        return [Text(event.text)] if event.text else []

    def _take(self, piece: Piece) -> None:
        match piece:
            case Begin(_, name):
                call_id = self._reader.new_id() if self._reader else ""
                self._begin(Block("tool_use", name, call_id.replace("call_", CALL_ID)))
            case Arguments(_, text):
                self._add(text)
            case Text(text):
                self._continue("text", text)
            case Thought(text):
                self._continue("thinking", text if self._asked.shows_thoughts else "")

    def _continue(self, kind: str, text: str) -> None:
        """Add to the last block if it is of this kind, else begin one. White space alone begins none."""
        if not self.blocks or self.blocks[-1].kind != kind:
            if self.blocks:
                text = text.removeprefix(GAP)
            if kind == "text" and not text.strip():
                return
            self._begin(Block(kind))
        if text:
            self._add(text)

    def _begin(self, block: Block) -> None:
        self._close()
        self.blocks.append(block)
        self._tell("content_block_start", index=len(self.blocks) - 1, content_block=block.begun())

    def _add(self, text: str) -> None:
        block = self.blocks[-1]
        block.texts.append(text)
        self._tell("content_block_delta", index=len(self.blocks) - 1, delta=block.delta(text))

    def _close(self) -> None:
        if not self.blocks:
            return
        index = len(self.blocks) - 1
        if self.blocks[-1].kind == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            self._tell("content_block_delta", index=index, delta=delta)
        self._tell("content_block_stop", index=index)

    def _tell(self, kind: str, **fields: object) -> None:
        self._told.append(_event(kind, {"type": kind, **fields}))


def usage_of(counted: Usage) -> Json:
    """Anthropic's object: tokens that were cached are not among the input's. Every prompt is cached at no
    cost, so nothing is counted as written to the cache."""
    return {
        "input_tokens": counted.prompt_tokens - counted.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached_tokens,
        "output_tokens": counted.completion_tokens,
    }


async def whole(asked: Asked, events: Events) -> Json:
    """The message in one piece."""
    output = Output(asked)
    found: Json = {}
    async with aclosing(events):
        async for _, event in events:
            if event.kind == "error":
                raise asked.order.failure(event.error)
            output.saw(event)
            if event.kind == "done":
                found = output.ended(event)
            await asyncio.sleep(0)  # all events may already be here; give other requests a turn
    return found


async def chunks(asked: Asked, events: Events) -> AsyncGenerator[str, None]:
    """The message in pieces. A ping with each part of the prompt keeps the connection alive."""
    output, begun = Output(asked), False
    async with aclosing(events):
        async for _, event in events:
            if event.kind == "error":
                raise asked.order.failure(event.error)
            if not begun:
                output.begin(_prompt(event))
                begun = True
            if event.progress:
                for told in output.taken():
                    yield told
                yield PING
                continue
            output.saw(event)
            if event.kind == "done":
                output.ended(event)
            for told in output.taken():
                yield told


def _prompt(event: Event) -> Usage:
    """What a first event tells of the prompt."""
    if event.progress:
        return Usage(event.progress.total, 0, event.progress.cached)
    return Usage(event.usage.prompt_tokens, 0, event.usage.cached_tokens)


def _arguments(text: str) -> object:
    """The arguments of a call; an empty object if a limit cut them off."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _event(kind: str, fields: Json) -> str:
    return f"event: {kind}\ndata: {json_text(fields)}"
