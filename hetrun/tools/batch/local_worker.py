"""Answers by the server that is part of this process; the model runs in a process of its own, as always.

So a line gets what the same request to `hetrun serve` gets, errors and all.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from hetrun.errors import EngineStopped
from hetrun.tools.batch.request_lines import Ask
from hetrun.tools.batch.result_lines import Reply
from hetrun.tools.batch.worker import Away, Place

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope

STOPPED, BUSY = 503, 429
AGAIN_S = 1.0


class LocalPlace(Place):
    """A server without a socket."""

    name = "this machine"

    def __init__(self, app: ASGIApp, lanes: int) -> None:
        self.lanes = lanes
        self._app = app

    async def answer(self, ask: Ask) -> Reply:
        reply = await self._call(ask.url, json.dumps(ask.body).encode())
        if reply.status == STOPPED:
            raise EngineStopped(_message(reply))
        if reply.status == BUSY:  # others may be asking this engine, too
            raise Away(_message(reply), AGAIN_S, blameless=True)
        return reply

    async def _call(self, path: str, body: bytes) -> Reply:
        status, parts, unread = 500, list[bytes](), [body]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await asyncio.Event().wait()  # the client never hangs up
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
        scope: Scope = {
            **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"},
            **{"method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""},
            **{"root_path": "", "client": None, "server": ("localhost", None)},
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        await self._app(scope, receive, send)
        return Reply(status, b"".join(parts))


def _message(reply: Reply) -> str:
    try:
        return str(json.loads(reply.body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return f"status {reply.status}"
