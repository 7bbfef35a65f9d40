"""Requests that come together are read one behind the other, and others are answered in between."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class InTurn:
    """Middleware: who has sent a whole body goes on when its turn comes: one in each round of the loop.

    What follows a body is half a millisecond of work: to read what it asks for, to give it to the engine. Of
    200 requests that come at once that would be one long round, for whose end even /health would wait.
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
