"""A client of a server that takes as little of the machine as it can: what it takes, the server lacks.

HTTP/1.1 over a Unix socket or a port, a connection for each request: llama.cpp's server closes it after a
stream. Events are handed out as bytes; their JSON is not parsed while a server is being measured.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from hetrun.errors import HetrunError

CHAT = "/v1/chat/completions"
HEAD_END, LINE_END, EVENT_END = b"\r\n\r\n", b"\r\n", b"\n\n"
# Quotes inside a text are escaped, so this can only be the field itself, and not an empty one.
TEXT = re.compile(rb'"content":\s*"(?!")')
USAGE = re.compile(rb'"usage":\s*\{')
FAILED = re.compile(rb'data: \{"error"')
MOST_QUOTED = 300  # letters of an answer that was refused

OnEvent = Callable[[bytes, float], None]  # the event, and when it came


class RequestRefused(HetrunError):
    """The server answered with something else than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        said = body.decode(errors="replace")
        super().__init__(f"the server answered {status}: {said[:MOST_QUOTED]}")
        self.status = status


class ConnectionLost(HetrunError):
    """The connection ended in the middle of an answer."""


@dataclass(frozen=True, slots=True)
class ServerEndpoint:
    """Where a server listens: a Unix socket, or a port."""

    uds: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    key: str | None = None  # that its clients must send

    async def connect(self) -> LoadConnection:
        """A connection of its own; OSError if no server listens."""
        loop = asyncio.get_running_loop()
        if self.uds is not None:
            _, protocol = await loop.create_unix_connection(lambda: _Protocol(), str(self.uds))
        else:
            _, protocol = await loop.create_connection(lambda: _Protocol(), self.host, self.port)
        return LoadConnection(protocol, f"Authorization: Bearer {self.key}\r\n" if self.key else "")


class LoadConnection:
    """One request after the other."""

    def __init__(self, protocol: _Protocol, headers: str) -> None:
        self._protocol = protocol
        self._headers = headers

    async def post(self, body: bytes, on_event: OnEvent, path: str = CHAT) -> bytes:
        """Ask and wait for the end of the answer. The events of a stream go to `on_event`; what is no stream
        is returned. Raises `RequestRefused` and `ConnectionLost`."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"{self._headers}Content-Length: {len(body)}\r\n\r\n"
        )
        return await self._ask(head.encode() + body, on_event)

    async def get(self, path: str) -> bytes:
        """What lies there."""
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{self._headers}\r\n"
        return await self._ask(head.encode(), _unexpected)

    def leave(self) -> None:
        """Hang up, in the middle of an answer too."""
        self._protocol.hang_up()

    async def _ask(self, request: bytes, on_event: OnEvent) -> bytes:
        status, body = await self._protocol.ask(request, on_event)
        if status != 200:
            raise RequestRefused(status, body)
        return body


def _unexpected(event: bytes, at: float) -> None:
    raise HetrunError(f"the server sent an unexpected stream: {event[:MOST_QUOTED]!r}")


class _Protocol(asyncio.Protocol):
    """The bytes of answers, as they come."""

    def __init__(self) -> None:
        self._transport: asyncio.BaseTransport | None = None
        self._reader = HttpAnswerReader(_unexpected)
        self._over: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def ask(self, request: bytes, on_event: OnEvent) -> asyncio.Future[tuple[int, bytes]]:
        assert isinstance(self._transport, asyncio.WriteTransport), "asked before it was connected"
        self._reader = HttpAnswerReader(on_event)
        over = self._over = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            over.set_exception(ConnectionLost("the server closed the connection before it was asked"))
        else:
            self._transport.write(request)
        return over

    def data_received(self, data: bytes) -> None:
        over = self._over
        if over is None or over.done():
            return
        try:
            self._reader.feed(data, perf_counter())
        except HetrunError as error:
            over.set_exception(error)
            return
        if self._reader.ended:
            over.set_result((self._reader.status, bytes(self._reader.body)))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_exception(
                ConnectionLost(f"the server closed the connection in the middle of an answer ({exc})")
            )

    def hang_up(self) -> None:
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()


class HttpAnswerReader:
    """One answer out of pieces of bytes, wherever they were cut."""

    def __init__(self, on_event: OnEvent) -> None:
        self.status = 0  # known once the head is here
        self.ended = False
        self.body = bytearray()  # what is not handed out as events
        self._on_event = on_event
        self._raw = bytearray()  # what is not understood yet
        self._is_stream = self._is_chunked = False
        self._left = 0  # bytes of the body, or of the chunk, that are missing

    def feed(self, data: bytes, at: float) -> None:
        """The next piece, and when it came."""
        self._raw += data
        if not self.status and not self._take_head():
            return
        if self._is_chunked:
            self._take_chunks()
        else:
            self._left -= self._take(self._left)
            self.ended = not self._left
        if self._is_stream:
            self._hand_out(at)

    def _take_head(self) -> bool:
        end = self._raw.find(HEAD_END)
        if end < 0:
            return False
        first, *lines = self._raw[:end].decode("latin-1").split("\r\n")
        del self._raw[: end + len(HEAD_END)]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        try:
            self.status = int(first.split(" ")[1])
            self._left = int(headers.get("content-length", 0))
        except (IndexError, ValueError):
            raise HetrunError(f"this is not an HTTP server: it answered {first[:MOST_QUOTED]!r}") from None
        self._is_chunked = "chunked" in headers.get("transfer-encoding", "")
        self._is_stream = self.status == 200 and "event-stream" in headers.get("content-type", "")
        return True

    def _take(self, most: int) -> int:
        part = self._raw[:most]
        self.body += part
        del self._raw[: len(part)]
        return len(part)

    def _take_chunks(self) -> None:
        """Chunks, each behind a line with its size and in front of an empty line; the last one is empty."""
        while not self.ended:
            if self._left > len(LINE_END):
                self._left -= self._take(self._left - len(LINE_END))
            if 0 < self._left <= len(LINE_END):
                gone = min(self._left, len(self._raw))
                del self._raw[:gone]
                self._left -= gone
            if self._left:
                return
            end = self._raw.find(LINE_END)
            if end < 0:
                return
            size = int(self._raw[:end].split(b";")[0], 16)
            if not size and len(self._raw) < end + 2 * len(LINE_END):
                return  # the empty line behind it is still to come
            del self._raw[: end + len(LINE_END)]
            self._left = size + len(LINE_END)
            self.ended = not size

    def _hand_out(self, at: float) -> None:
        begin = 0
        while (end := self.body.find(EVENT_END, begin)) >= 0:
            self._on_event(bytes(self.body[begin:end]), at)
            begin = end + len(EVENT_END)
        del self.body[:begin]


@dataclass(slots=True)
class TimedAnswer:
    """A streamed answer, as a user sees it: when it was asked for, and when each piece of it came."""

    asked: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of pieces of text: tokens, mostly one each
    ended: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, event: bytes, at: float) -> None:
        """The next event of its stream."""
        if TEXT.search(event):
            self.arrivals.append(at)
        elif USAGE.search(event):
            self.usage = json.loads(event.removeprefix(b"data: "))["usage"]
        elif FAILED.match(event):
            said = event.decode(errors="replace")
            raise HetrunError(f"an answer ended with an error: {said[:MOST_QUOTED]}")

    @property
    def tokens(self) -> int:
        """Tokens of the answer, as the server counted them."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, as the server counted them."""
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the server had computed before."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    @property
    def first(self) -> float:
        """Seconds until the first text came."""
        return self.arrivals[0] - self.asked

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece of text and the next."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def ask(endpoint: ServerEndpoint, body: bytes, answer: TimedAnswer | None = None) -> TimedAnswer:
    """One streamed answer, to its end. Cancelling this hangs up."""
    answer = answer or TimedAnswer()
    answer.asked = perf_counter()
    connection = await endpoint.connect()
    try:
        await connection.post(body, answer.take)
    finally:
        connection.leave()
    answer.ended = perf_counter()
    if not answer.arrivals:
        raise HetrunError("an answer had no text in it, so there is nothing to measure")
    return answer
