"""In the engine's process: queries run on threads of their own, so that no request waits for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from hetrun.client.queries import LANES, Question
from hetrun.client.wire_protocol import QueryMessage, ReplyMessage, portable


class QueryHandler(Protocol):
    """Answers queries."""

    def ask(self, question: Question[Any]) -> object:
        """The answer; waits for it, and is called from several threads."""
        ...


class Lanes:
    """A queue for each kind of query. A queue with a single thread keeps their order."""

    def __init__(self, engine: QueryHandler, send: Callable[[ReplyMessage], None]) -> None:
        self._engine = engine
        self._send = send
        self._queues = {lane: queue.SimpleQueue[QueryMessage]() for lane in LANES}
        for lane, count in LANES.items():
            for i in range(count):
                name = f"hetrun-lane-{lane}-{i}"
                threading.Thread(
                    target=self._serve, args=(self._queues[lane],), name=name, daemon=True
                ).start()

    def put(self, order: QueryMessage) -> None:
        """Queue a query; it is answered in its turn."""
        self._queues[order.question.lane].put(order)

    def _serve(self, orders: queue.SimpleQueue[QueryMessage]) -> None:
        while True:
            order = orders.get()
            try:
                reply = ReplyMessage(order.key, self._engine.ask(order.question))
            except Exception as error:
                reply = ReplyMessage(order.key, None, portable(error))
            self._send(reply)
