"""Counts what the server answers, for /metrics."""

from __future__ import annotations

from collections import Counter
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestTraffic:
    """Requests by the status of their answers."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.open = 0
        self.seconds = 0.0  # of all answered requests, to the end of the answer
        self.answered = 0


class RequestCounter:
    """Middleware that writes a `RequestTraffic`."""

    def __init__(self, app: ASGIApp, traffic: RequestTraffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        traffic, begin = self._traffic, perf_counter()

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                traffic.statuses[message["status"]] += 1
            await send(message)

        traffic.open += 1
        try:
            await self._app(scope, receive, counting)
        finally:
            traffic.open -= 1
            traffic.answered += 1
            traffic.seconds += perf_counter() - begin
