"""Answers by servers elsewhere, of ours or of others with OpenAI's interface, over TCP or a Unix socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass

import h11

from hetrun.client.address import Address
from hetrun.errors import OptionError
from hetrun.system.units import format_bytes
from hetrun.tools.batch.request_lines import Ask
from hetrun.tools.batch.result_lines import Reply
from hetrun.tools.batch.worker import Away, Place

LANES = 16  # of a server that does not say how many answers it gives at a time
MOST_LANES = 256
LOOK_S = 10.0  # for an answer that needs no model
CHUNK = 1 << 16
MOST_ANSWER = 256 << 20
# Not the request's fault: busy, restarting, or a gateway that reaches no server.
AWAY = (408, 429, 502, 503, 504)
DEADLINE = 504  # where the server says not to ask again, the request's own has passed


class Worker(Place):
    """One server. A connection is kept for each request that it has at a time."""

    def __init__(self, where: Address, key: str | None = None) -> None:
        self.name = where.url
        self.lanes = LANES
        self._where = where
        self._key = key
        self._idle: list[_Connection] = []

    async def look(self) -> str:
        """How many answers it gives at a time, and the model it has; Away if it is not there."""
        props = await self._get("/props")
        slots = props.get("total_slots")
        if type(slots) is int and slots > 0:
            self.lanes = min(MOST_LANES, slots + max(2, slots // 4))
        models = (await self._get("/v1/models")).get("data")
        first = models[0] if isinstance(models, list) and models else None
        return str(first.get("id", "")) if isinstance(first, dict) else ""

    async def answer(self, ask: Ask) -> Reply:
        body = json.dumps(ask.body).encode()
        reply = await self._ask("POST", ask.url, body)
        if reply.status in AWAY and not (reply.status == DEADLINE and reply.final):
            raise Away(f"{self.name} answers with status {reply.status}", reply.after_s, blameless=True)
        return Reply(reply.status, reply.body)

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _get(self, path: str) -> Mapping[str, object]:
        try:
            async with asyncio.timeout(LOOK_S):
                reply = await self._ask("GET", path, b"")
        except TimeoutError:
            raise Away(f"{self.name} does not answer within {LOOK_S:g} s", blameless=True) from None
        if reply.status in (401, 403):
            raise OptionError(f"--workers {self.name} needs a different key: give it with --api-key")
        try:
            found = json.loads(reply.body)
        except (ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else {}

    async def _ask(self, method: str, path: str, body: bytes) -> _Answer:
        """Over a connection that is open, or a new one: the server may have closed it meanwhile."""
        while True:
            old = bool(self._idle)
            connection = self._idle.pop() if old else await self._connected()
            try:
                answer = await connection.ask(method, self._where.path + path, body, self._key)
            except (OSError, EOFError, h11.ProtocolError) as error:
                connection.close()
                if old and not connection.answering:
                    continue
                why = str(error) or "the connection ended"
                raise Away(f"{self.name} closed the connection: {why}") from None
            except BaseException:
                connection.close()
                raise
            if connection.again():
                self._idle.append(connection)
            else:
                connection.close()
            return answer

    async def _connected(self) -> _Connection:
        try:
            return _Connection(self._where.header, *await self._where.connected())
        except OSError as error:
            raise Away(f"{self.name} cannot be reached: {error}", blameless=True) from None


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    after_s: float | None  # when to come again
    final: bool


class _Connection:
    """One request after the other over one stream."""

    def __init__(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.answering = False  # something of an answer came
        self._host = host
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)

    async def ask(self, method: str, path: str, body: bytes, key: str | None) -> _Answer:
        self.answering = False
        headers = [("Host", self._host), ("Content-Type", "application/json"), ("Accept", "application/json")]
        headers += [("Content-Length", str(len(body)))]
        headers += [("Authorization", f"Bearer {key}")] if key else []
        events = [
            h11.Request(method=method, target=path, headers=headers),
            h11.Data(body),
            h11.EndOfMessage(),
        ]
        for event in events:
            self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()
        return await self._answer()

    async def _answer(self) -> _Answer:
        parts, size, status, headers = list[bytes](), 0, 0, dict[bytes, bytes]()
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(CHUNK))
            elif isinstance(event, h11.Response):
                self.answering, status, headers = True, event.status_code, dict(event.headers)
            elif isinstance(event, h11.Data):
                size += len(event.data)
                if size > MOST_ANSWER:
                    raise EOFError(f"its answer is larger than {format_bytes(MOST_ANSWER)}")
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                final = headers.get(b"x-should-retry") == b"false"
                return _Answer(status, b"".join(parts), _seconds(headers.get(b"retry-after")), final)
            elif isinstance(event, h11.ConnectionClosed):
                raise EOFError

    def again(self) -> bool:
        """Whether the connection takes another request."""
        try:
            self._http.start_next_cycle()
        except h11.ProtocolError:
            return False
        return not self._reader.at_eof()

    def close(self) -> None:
        self._writer.close()


def _seconds(header: bytes | None) -> float | None:
    try:
        return min(60.0, max(0.0, float(header))) if header else None
    except ValueError:
        return None
