"""Limits on the requests and bytes that the server holds at a time."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetrun.server.errors import ApiError, overloaded
from hetrun.system.units import format_bytes

MOST_REQUESTS = 1024
MOST_BYTES = 256 * 2**20  # of bodies: a full queue of long conversations, or four of the largest bodies
RETRY_S = 5.0  # the requests have not been read, so there is no prediction


class Crowd:
    """Middleware: refuses requests and bytes beyond its limits before they are read.

    The engine's own queue is shorter. These limits protect the memory and descriptors of this process from a
    flood of clients.
    """

    def __init__(self, app: ASGIApp, most_requests: int, most_bytes: int | None = None) -> None:
        self._app = app
        self._most_requests = most_requests
        self._most_bytes = MOST_BYTES if most_bytes is None else most_bytes
        self._requests = 0
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._requests >= self._most_requests:
            refusal = _refusal(f"{self._requests} requests are in progress already")
            await refusal.response(scope["path"])(scope, receive, send)
            return
        mine = 0

        async def counted() -> Message:
            nonlocal mine
            message = await receive()
            size = len(message.get("body", b""))
            if self._bytes + size > self._most_bytes:
                raise _refusal(f"{format_bytes(self._bytes)} of requests are in progress already")
            mine += size
            self._bytes += size
            return message

        self._requests += 1
        try:
            await self._app(scope, counted, send)
        finally:
            self._requests -= 1
            self._bytes -= mine


def _refusal(held: str) -> ApiError:
    # Unread data makes the connection useless.
    return overloaded(f"{held}; try again in {RETRY_S:g} s", RETRY_S, {"connection": "close"})
