"""HTTP/1.1 over an open stream, as clients speak it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import h11

CHUNK = 1 << 16


class HttpConnection:
    """One request after the other over one stream; OSError, EOFError or h11.ProtocolError if it breaks."""

    def __init__(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.is_answered = False  # the head of an answer to the last request came
        self._host = host
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)

    async def send(
        self, method: str, target: str, headers: Iterable[tuple[str, str]], content: bytes
    ) -> h11.Response:
        """Send a request, with these headers besides those that each has; the head of the answer."""
        self.is_answered = False
        all_headers = [("Host", self._host), ("Content-Type", "application/json")]
        all_headers += [("Content-Length", str(len(content))), *headers]
        head = h11.Request(method=method, target=target, headers=all_headers)
        for part in (head, h11.Data(content), h11.EndOfMessage()):
            self._writer.write(self._http.send(part) or b"")
        await self._writer.drain()
        while isinstance(event := await self._next(), h11.InformationalResponse):
            pass
        if not isinstance(event, h11.Response):
            raise EOFError
        self.is_answered = True
        return event

    async def parts(self) -> AsyncIterator[bytes]:
        """The answer's body as it comes."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise EOFError

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(CHUNK))
        return event

    def renew(self) -> bool:
        """After a whole answer: whether the connection takes another request."""
        try:
            self._http.start_next_cycle()
        except h11.ProtocolError:
            return False
        return not self._reader.at_eof()

    def close(self) -> None:
        """Ends a request that is not answered yet, too."""
        self._writer.close()
