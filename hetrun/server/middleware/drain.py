"""Reads and discards the rest of a refused request, within a time limit."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_S = 5.0  # from this machine, of a gigabyte and more


class RequestDrain:
    """Middleware: a response is complete when its request is, or after a time limit.

    Closing a connection with unread data resets it, and the client's system may discard the response: the
    client would see the reset instead of the refusal.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        heard = False  # all of the request

        async def reading() -> Message:
            nonlocal heard
            message = await receive()
            heard = not message.get("more_body", False)
            return message

        async def sending(message: Message) -> None:
            ends = message["type"] == "http.response.body" and not message.get("more_body", False)
            if ends and not heard and _has_body(scope):
                await send({**message, "more_body": True})
                await _throw_away(receive)
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, reading, sending)


def _has_body(scope: Scope) -> bool:
    said = dict(scope["headers"])
    return b"transfer-encoding" in said or said.get(b"content-length", b"0") != b"0"


async def _throw_away(receive: Receive) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(MOST_S):
            while (await receive()).get("more_body", False):
                pass
