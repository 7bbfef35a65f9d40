"""The clients of `python -m tests.tools.soak`, and who asks for /health: what its two other processes do."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hetrun.tools.bench.serving.http_load import (
    CHAT,
    ConnectionLost,
    HttpAnswerReader,
    RequestRefused,
    ServerEndpoint,
)

FLOOD = 200
FLOOD_EVERY_S = 30.0
WORKERS = 8  # clients besides floods
PAUSE_S = 0.05  # between two requests of a client: the machine is the server's
PROBE_S = 0.05
MOST_S = 120.0  # for any single answer
SLOW_S = 0.3  # between pieces that are sent or read slowly
HUGE = 65 << 20  # more than the server takes
QUOTED = 20  # surprises that are told

WORDS = "time water and the of people small under house light seven is".split()
MISSHAPEN: tuple[tuple[str, object], ...] = (
    (CHAT, []),
    (CHAT, {}),
    (CHAT, {"messages": "hello"}),
    (CHAT, {"messages": [{"role": 7, "content": "x"}]}),
    (CHAT, {"messages": [{"role": "user", "content": {"a": 1}}]}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 10**9}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "stop": {"a": []}}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": 3}]}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}}),
    ("/v1/completions", {"prompt": {"a": 1}}),
    ("/v1/completions", {"prompt": [[-1]]}),
    ("/v1/completions", {"prompt": "x", "logprobs": 10**6}),
    ("/v1/embeddings", {"input": [[]]}),
    ("/tokenize", {"content": 5}),
    ("/detokenize", {"tokens": [10**12]}),
)


@dataclass
class Told:
    """What the traffic has to say."""

    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    surprises: list[str] = field(default_factory=list)
    server_errors: int = 0
    floods: list[tuple[float, float]] = field(default_factory=list)  # when all were on their way, and the end


class Traffic:
    """Clients of all sorts."""

    def __init__(self, endpoint: ServerEndpoint, seed: int) -> None:
        self.told = Told()
        self._endpoint = endpoint
        self._rng = random.Random(seed)
        # Who they are, and what they may be answered with; refusals of a full server count as well.
        self._sorts: tuple[tuple[str, Callable[[], Awaitable[str]], tuple[str, ...]], ...] = (
            ("chat", self._chat, ("200",)),
            ("stream", self._stream, ("200",)),
            ("echo", self._echo, ("200",)),
            ("structured", self._structured, ("200",)),
            ("tools", self._tools, ("200",)),
            ("responses", self._responses, ("200",)),
            ("embeddings", self._embeddings, ("200",)),
            ("tokenize", self._tokenize, ("200",)),
            ("models", lambda: self._get("/v1/models"), ("200",)),
            ("slots", lambda: self._get("/slots"), ("200",)),
            ("metrics", lambda: self._get("/metrics"), ("200",)),
            ("nowhere", lambda: self._get("/v1/nowhere"), ("404",)),
            ("bad json", lambda: self._post(CHAT, b'{"messages": [' * 50), ("400",)),
            ("wrong types", self._misshapen, ("400",)),
            ("huge body", self._huge, ("413",)),
            ("leaves", self._leaves, ("left",)),
            ("slow sender", self._slow_sender, ("200",)),
            ("half a body", self._half, ("left",)),
            ("slow reader", self._slow_reader, ("200",)),
        )

    async def run(self, seconds: float) -> None:
        """Until the time is over and the last answer has come."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(end) for _ in range(WORKERS)), self._flooding(end))

    async def _client(self, end: float) -> None:
        while time.monotonic() < end:
            await self._one(*self._rng.choice(self._sorts))
            await asyncio.sleep(PAUSE_S)

    async def _flooding(self, end: float) -> None:
        await asyncio.sleep(FLOOD_EVERY_S / 3)
        while time.monotonic() < end:
            asking = [asyncio.ensure_future(self._one("flood", self._chat, ("200",))) for _ in range(FLOOD)]
            begin = time.monotonic()
            await asyncio.gather(*asking)
            self.told.floods.append((begin, time.monotonic()))
            await asyncio.sleep(max(0.0, min(FLOOD_EVERY_S, end - time.monotonic())))

    async def _one(self, sort: str, does: Callable[[], Awaitable[str]], right: Sequence[str]) -> None:
        try:
            status = await asyncio.wait_for(does(), MOST_S)
        except (ConnectionLost, OSError, EOFError) as error:
            status = "gone"
            said = repr(error)
        except TimeoutError:
            status = said = "no answer in time"
        else:
            said = status
        name = status.partition(" ")[0] if status[:1].isdigit() else status
        self.told.statuses.setdefault(sort, Counter())[name] += 1
        self.told.server_errors += name.startswith("5")
        if name not in (*right, "429") and len(self.told.surprises) < QUOTED:
            self.told.surprises.append(f"{sort}: {said}"[:400])

    def _text(self, most: int = 60) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, most)))

    def _said(self, **more: object) -> bytes:
        message = {"role": "user", "content": self._text()}
        return json.dumps(
            {"messages": [message], "max_tokens": self._rng.choice((4, 16, 48)), **more}
        ).encode()

    async def _post(self, path: str, body: bytes) -> str:
        connection = await self._endpoint.connect()
        ends: list[bytes] = []
        try:
            await connection.post(body, lambda event, at: ends.append(event), path)
        except RequestRefused as refusal:
            return str(refusal.status) + f" {refusal}"
        finally:
            connection.leave()
        if ends and ends[-1] != b"data: [DONE]":
            raise ConnectionLost(f"a stream ended with {ends[-1][:200]!r}")
        return "200"

    async def _get(self, path: str) -> str:
        connection = await self._endpoint.connect()
        try:
            await connection.get(path)
        except RequestRefused as refusal:
            return str(refusal.status)
        finally:
            connection.leave()
        return "200"

    async def _chat(self) -> str:
        return await self._post(CHAT, self._said(n=self._rng.choice((1, 1, 1, 3))))

    async def _stream(self) -> str:
        return await self._post(CHAT, self._said(stream=True))

    async def _structured(self) -> str:
        schema = {
            "type": "object",
            "properties": {"a": {"enum": self._rng.sample(WORDS, 3)}},
            "required": ["a"],
        }
        return await self._post(CHAT, self._said(json_schema=schema))

    async def _tools(self) -> str:
        function = {"name": self._rng.choice(WORDS), "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": function}]
        return await self._post(
            CHAT, self._said(tools=tools, tool_choice=self._rng.choice(("auto", "required")))
        )

    async def _responses(self) -> str:
        asked = {"input": self._text(), "max_output_tokens": 16}
        return await self._post("/v1/responses", json.dumps(asked).encode())

    async def _echo(self) -> str:
        prompts = [self._text(), self._text()]
        asked = {"prompt": prompts, "max_tokens": self._rng.choice((0, 4)), "echo": True, "logprobs": 1}
        return await self._post("/v1/completions", json.dumps(asked).encode())

    async def _embeddings(self) -> str:
        texts = [self._text() for _ in range(self._rng.randint(1, 8))]
        return await self._post("/v1/embeddings", json.dumps({"input": texts}).encode())

    async def _tokenize(self) -> str:
        return await self._post("/tokenize", json.dumps({"content": self._text(2000)}).encode())

    async def _misshapen(self) -> str:
        path, body = self._rng.choice(MISSHAPEN)
        status = await self._post(path, json.dumps(body).encode())
        return status if status.startswith("400") else f"{status} to {path} {body}"

    async def _leaves(self) -> str:
        asking = asyncio.ensure_future(self._post(CHAT, self._said(stream=True, max_tokens=400)))
        await asyncio.wait([asking], timeout=self._rng.uniform(0, 0.5))
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        return "left"

    # What is below speaks HTTP itself: it does what no library does.

    async def _opened(self, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # A small limit, so that what is not read stays with the server.
        reader, writer = await asyncio.open_unix_connection(str(self._endpoint.uds), limit=1024)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
        )
        writer.write(head.encode())
        return reader, writer

    async def _answered(self, reader: asyncio.StreamReader, pause: float = 0.0) -> str:
        answer = HttpAnswerReader(lambda event, at: None)
        while not answer.ended:
            piece = await reader.read(512)
            if not piece:
                raise ConnectionLost("the server closed the connection in the middle of an answer")
            answer.feed(piece, 0.0)
            await asyncio.sleep(pause)
        return str(answer.status)

    async def _huge(self) -> str:
        reader, writer = await self._opened(HUGE)
        try:
            for _ in range(8):  # it may well be refused before
                writer.write(b" " * (1 << 16))
                await writer.drain()
            return await self._answered(reader)
        finally:
            writer.transport.abort()

    async def _slow_sender(self) -> str:
        body = self._said()
        reader, writer = await self._opened(len(body))
        try:
            for begin in range(0, len(body), 32):
                writer.write(body[begin : begin + 32])
                await writer.drain()
                await asyncio.sleep(SLOW_S)
            return await self._answered(reader)
        finally:
            writer.transport.abort()

    async def _half(self) -> str:
        body = self._said()
        _, writer = await self._opened(len(body))
        writer.write(body[: len(body) // 2])
        await asyncio.sleep(self._rng.uniform(0, 2))
        writer.transport.abort()
        return "left"

    async def _slow_reader(self) -> str:
        body = self._said(stream=True)
        reader, writer = await self._opened(len(body))
        try:
            writer.write(body)
            return await self._answered(reader, SLOW_S)
        finally:
            writer.transport.abort()


async def probed(endpoint: ServerEndpoint, seconds: float) -> list[tuple[float, float]]:
    """When /health was asked for, and how long it took."""
    found = []
    end = time.monotonic() + seconds
    while (begin := time.monotonic()) < end:
        connection = await endpoint.connect()
        try:
            await connection.get("/health")
        finally:
            connection.leave()
        found.append((begin, time.monotonic() - begin))
        await asyncio.sleep(PROBE_S)
    return found
