"""Answers by servers elsewhere, of ours or of others with OpenAI's interface, over TCP or a Unix socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass

import h11

from hetrun.client.address import Address
from hetrun.client.remote.http_connection import HttpConnection
from hetrun.errors import OptionError
from hetrun.system.strict_json import join_bounded
from hetrun.system.units import format_bytes
from hetrun.tools.batch.request_lines import Ask
from hetrun.tools.batch.result_lines import Reply
from hetrun.tools.batch.worker import Away, Place

LANES = 16  # of a server that does not say how many answers it gives at a time
MOST_LANES = 256
LOOK_S = 10.0  # for an answer that needs no model
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
        self._idle: list[HttpConnection] = []

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
                answer = await self._exchange(connection, method, path, body)
            except (OSError, EOFError, h11.ProtocolError) as error:
                connection.close()
                if old and not connection.is_answered:
                    continue
                why = str(error) or "the connection ended"
                raise Away(f"{self.name} closed the connection: {why}") from None
            except BaseException:
                connection.close()
                raise
            if connection.renew():
                self._idle.append(connection)
            else:
                connection.close()
            return answer

    async def _exchange(self, connection: HttpConnection, method: str, path: str, body: bytes) -> _Answer:
        headers = [("Accept", "application/json")]
        headers += [("Authorization", f"Bearer {self._key}")] if self._key else []
        head = await connection.send(method, self._where.path + path, headers, body)
        too_large = f"its answer is larger than {format_bytes(MOST_ANSWER)}"
        content = await join_bounded(connection.parts(), MOST_ANSWER, lambda: EOFError(too_large))
        said = dict(head.headers)
        final = said.get(b"x-should-retry") == b"false"
        return _Answer(head.status_code, content, _seconds(said.get(b"retry-after")), final)

    async def _connected(self) -> HttpConnection:
        try:
            return HttpConnection(self._where.header, *await self._where.connected())
        except OSError as error:
            raise Away(f"{self.name} cannot be reached: {error}", blameless=True) from None


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    after_s: float | None  # when to come again
    final: bool


def _seconds(header: bytes | None) -> float | None:
    try:
        return min(60.0, max(0.0, float(header))) if header else None
    except ValueError:
        return None
