"""Requests that arrive together are read one after another, with other requests in between."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class InTurn:
    """Middleware: requests with a complete body continue in turn, one in each round of the event loop.

    Parsing a request and passing it to the engine takes half a millisecond. With 200 requests at once, that
    would be one long round, and even /health would have to wait for its end.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turn = asyncio.Lock()  # first come, first served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        complete = False

        async def in_turn() -> Message:
            nonlocal complete
            message = await receive()
            if not complete and not message.get("more_body", False):
                complete = True
                async with self._turn:
                    await asyncio.sleep(0)
            return message

        await self._app(scope, in_turn, send)
