"""A streamed answer: server-sent events, or lines of JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hetrun.server.disconnect import unless_gone
from hetrun.server.errors import ApiError
from hetrun.server.json_stream import json_text

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends each JSON text as one event; ends its source when the client disconnects.

    An error in the middle is an event too, as OpenAI's clients expect, because the status has been sent.
    """

    media_type = "text/event-stream"

    end = DONE

    def __init__(self, chunks: AsyncGenerator[str, None]) -> None:
        # Proxies must neither cache an answer nor buffer it.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks):
            try:
                await unless_gone(receive, self._send_all(send))
            except (ClientDisconnect, OSError):
                return  # the client has gone

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await _send(send, self.framed(chunk))
            await _send(send, self.end)
        except ApiError as error:
            await _send(send, self.failed(error))
        await send({"type": "http.response.body", "body": b""})

    def framed(self, chunk: str) -> bytes:
        """The event for one chunk."""
        return _event(chunk)

    def failed(self, error: ApiError) -> bytes:
        """The event for an error in the middle."""
        return _event(json_text(error.body()))


class NamedEvents(EventStream):
    """Chunks are complete named events; the last one is marked as such, so there is no [DONE]."""

    end = b""

    def framed(self, chunk: str) -> bytes:
        """The event for one chunk."""
        return f"{chunk}\n\n".encode()


class JsonLines(EventStream):
    """An object in each line."""

    media_type = "application/x-ndjson"
    end = b""

    def framed(self, chunk: str) -> bytes:
        """The line for one chunk."""
        return f"{chunk}\n".encode()

    def failed(self, error: ApiError) -> bytes:
        """The line for an error in the middle."""
        return self.framed(json_text(error.body()))


def _event(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
