"""Counts what the server answers, for /metrics, and logs it."""

from __future__ import annotations

import logging
from collections import Counter
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_PATH = 200  # characters of it in a line

log = logging.getLogger(__name__)


class Traffic:
    """Requests by the status of their answers."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.open = 0
        self.seconds = 0.0  # of all that are answered, to the end of the answer
        self.answered = 0


class Counted:
    """Middleware that writes a `Traffic`, and with -v a line for each request."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        traffic, begin, status = self._traffic, perf_counter(), 0

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                traffic.statuses[status] += 1
            await send(message)

        traffic.open += 1
        try:
            await self._app(scope, receive, counting)
        finally:
            traffic.open -= 1
            traffic.answered += 1
            seconds = perf_counter() - begin
            traffic.seconds += seconds
            # Neither the query nor a header: they may hold what is nobody's business.
            who, where = (
                (scope.get("client") or ("unix",))[0],
                f"{scope['method']} {scope['path'][:MOST_PATH]}",
            )
            log.info('%s "%s" %s in %.3f s', who, where, status or "without an answer", seconds)
