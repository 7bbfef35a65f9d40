"""A line for each request, written by a thread of its own: a slow reader of the log delays no answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import datetime
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetrun.errors import printable

MOST_WAITING = 1000  # lines; further ones are dropped
MOST_PATH = 200  # characters
FAREWELL_S = 1.0  # for the last lines


class RequestLog:
    """Lines on their way to `write`; without `everything`, successful GETs are left out, because programs
    poll them."""

    def __init__(self, write: Callable[[str], None], *, everything: bool = False) -> None:
        self._write = write
        self._everything = everything
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="hetrun-request-log", daemon=True)
        self._thread.start()

    def wants(self, method: str, status: int) -> bool:
        """Whether such a request gets a line."""
        return self._everything or method not in ("GET", "HEAD") or status >= 400

    def put(self, line: str | None) -> None:
        """Queue a line to be written."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            pass

    def close(self) -> None:
        """Write pending lines, within a time limit."""
        self.put(None)
        self._thread.join(FAREWELL_S)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)


class RequestLogger:
    """Middleware: logs each request to a `RequestLog`: time, client, path, status and seconds, without its
    contents."""

    def __init__(self, app: ASGIApp, log: RequestLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, complete = perf_counter(), 0, False

        async def watched(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            if message["type"] == "http.response.body":
                complete = not message.get("more_body", False)

        try:
            await self._app(scope, receive, watched)
        finally:
            if self._log.wants(scope["method"], status if complete else 499):
                self._log.put(_line(scope, status, perf_counter() - begin, complete))


def _line(scope: Scope, status: int, seconds: float, complete: bool) -> str:
    path = printable(scope["path"][:MOST_PATH])
    client = scope.get("client")
    whose = client[0] if client else "socket"
    left = "" if complete else ", not complete: the client left or the server was stopped"
    now = datetime.now().astimezone().strftime("%H:%M:%S")
    return f"{now} {whose} {scope['method']} {path} {status or '-'} {seconds:.2f} s{left}"
