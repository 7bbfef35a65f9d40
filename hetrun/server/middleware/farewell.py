"""A request that still runs when the server ends is told so."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetrun.errors import EngineStopped
from hetrun.server.errors import STOPPING, api_error


class Farewell:
    """Middleware: a request that uvicorn cancels, as it does at its end, is answered with 503.

    Where an answer has begun, its stream has ended with an error event by then.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            if scope["type"] == "http" and not begun:
                with suppress(OSError):
                    await api_error(EngineStopped(STOPPING)).response()(scope, receive, send)
