"""Time limits for connections without progress.

uvicorn waits forever for the rest of a request's head, and for a client that doesn't read its answer. Both
occupy a descriptor; the second also an answer that the engine continues to write. This is uvicorn's protocol
over h11, because the other one has no limit on headers.
"""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

LOOK_S = 5.0  # between two looks
MOST_LOOKS = 6  # without a complete head, or without a byte that is read


class TimedConnection(H11Protocol):
    """Disconnects a client that neither sends nor reads."""

    _looking: asyncio.TimerHandle | None = None
    _headless = 0  # looks in a row that found a request begun and its head not complete
    _unread = 0  # bytes that the system did not take at the last look
    _stopped = 0  # looks in a row that found the same

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._looking:
            self._looking.cancel()
        super().connection_lost(exc)

    def _look_later(self) -> None:
        self._looking = self.loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        # Its type says that there is always one, but there is none before the first request.
        cycle = cast("RequestResponseCycle | None", self.cycle)
        waits_for_head = cycle is None or cycle.response_complete
        self._headless = self._headless + 1 if waits_for_head and not self.timeout_keep_alive_task else 0
        unread = self.transport.get_write_buffer_size()
        self._stopped = self._stopped + 1 if unread and unread == self._unread else 0
        self._unread = unread
        if max(self._headless, self._stopped) >= MOST_LOOKS:
            # Not `close`, which waits until all is read.
            self.transport.abort()
        else:
            self._look_later()
