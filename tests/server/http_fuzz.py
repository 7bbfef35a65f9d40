"""Bad requests by the thousand against a real server with a scripted engine.

python -m tests.server.http_fuzz --seconds 600. A burst is a number of connections with mutated bytes each.
After each burst a right request is answered, no task, descriptor or request is left, and the log has no
traceback; each bad request got a 4xx, or a closed connection, and never a 500. The seed of a burst that fails
is printed: `--seed` begins with it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import re
import resource
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from hetrun.client.engine_client import LocalClient
from hetrun.server import listen
from hetrun.server.app import create_app
from tests.support.fakes import FakeEngine

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
PATHS = (CHAT, TEXT, MESSAGES, "/v1/responses", "/v1/embeddings", "/api/chat", "/api/generate", "/completion")
OTHER_PATHS = ("/v1/models", "/health", "/metrics", "/slots", "/props", "/", "/tokenize", "/v1/rerank")
# How uvicorn logs a 400 of its own, and that it does not change protocols.
EXPECTED = (
    "Invalid HTTP request received.",
    "Unsupported upgrade request.",
    "No supported WebSocket library",
)
BURST, AT_ONCE = 128, 64
ANSWER_S = 20.0  # within which an answer or an end has to come; a busy machine counted
QUIET_S = 0.4  # after which a connection that sends nothing more is closed by the client
SLOW_S = 0.002  # between two bytes of a slow client
MOST_GROWTH = 96 << 20  # bytes of memory that thousands of bad requests may leave behind
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class FuzzedRequest(NamedTuple):
    """Bytes for one connection; `pieces`: how they are cut; `hangs_up`: the client leaves at once."""

    kind: str
    data: bytes
    pieces: int = 1
    hangs_up: bool = False


Maker = Callable[[random.Random], bytes]


def right(words: str = "say hello", path: str = CHAT, **more: object) -> bytes:
    """A request that is answered."""
    body = json.dumps({"messages": [{"role": "user", "content": words}], **more}).encode()
    return head("POST", path, ("Content-Type", "application/json"), ("Content-Length", str(len(body)))) + body


def head(method: str, path: str, *fields: tuple[str, str], host: str = "localhost") -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in fields),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def kept(request: bytes) -> bytes:
    """The same on a connection that stays."""
    return request.replace(b"Connection: close\r\n", b"", 1)


def posted(rng: random.Random, body: bytes, *fields: tuple[str, str]) -> bytes:
    return head("POST", rng.choice(PATHS), ("Content-Length", str(len(body))), *fields) + body


# --- what is wrong with them


def request_lines(rng: random.Random) -> bytes:
    method = rng.choice(["GET", "POST", "BREW", "", "get", "G\0T", "P" * rng.randrange(1, 9000), "\xff"])
    path = rng.choice(
        [
            *("/" + "a" * rng.randrange(1, 100_000), "//x", "/../../etc/passwd", "*", "", "/%00", "/%ff%fe"),
            *("http://other/", "/v1/models?" + "a=1&" * rng.randrange(2000), "/\x01", "/v1/chat completions"),
        ]
    )
    version = rng.choice(["HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTTP/2.0", "", "HTTP/1.1 x", "RTSP/1.0"])
    return f"{method} {path} {version}\r\nHost: localhost\r\n\r\n".encode("latin-1")


def header_floods(rng: random.Random) -> bytes:
    many = rng.randrange(1, 3000)
    name = rng.choice(
        ["X-A", "Cookie", "Host", "Content-Length", "Transfer-Encoding", "Authorization", "Origin"]
    )
    value = rng.choice(["a", "b" * rng.randrange(1, 200), "chunked", "0", "", "\xff\xfe", "1\t2"])
    return head(rng.choice(["GET", "POST"]), rng.choice(OTHER_PATHS + PATHS), *[(name, value)] * many)


def long_headers(rng: random.Random) -> bytes:
    return head("GET", "/v1/models", ("X" * rng.randrange(1, 70_000), "v" * rng.randrange(1, 200_000)))


def odd_headers(rng: random.Random) -> bytes:
    lines = rng.choices(
        [
            *(
                b"No-Colon",
                b": no name",
                b"Sp ace: x",
                b"X:\0",
                b" folded: x",
                b"X: a\rY: b",
                b"\xff\xfe: \xfd",
            ),
            *(b"Host: a, b", b"Host:", b"Connection: close, keep-alive, \xff", b"Expect: 100-continue"),
            *(b"Content-Encoding: gzip", b"Content-Type: text/\xff", b"Accept: " + b"*/*," * 500),
            *(
                b"Authorization: Bearer \xff\xfe",
                b"X-Request-Id: " + b"\xff" * 300,
                b"Range: bytes=0-999999999",
            ),
        ],
        k=rng.randrange(1, 6),
    )
    body = right().split(b"\r\n\r\n", 1)[1]
    first = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % (CHAT.encode(), len(body))
    return first + b"\r\n".join(lines) + b"\r\n\r\n" + body


def wrong_lengths(rng: random.Random) -> bytes:
    body = right().split(b"\r\n\r\n", 1)[1]
    said = rng.choice(
        [
            *(
                "-1",
                "+5",
                "0x10",
                "1e3",
                "",
                " ",
                "9" * rng.randrange(1, 6000),
                "18446744073709551616",
                "5, 6",
            ),
            *(
                str(len(body) + rng.randrange(1, 99)),
                str(max(0, len(body) - rng.randrange(1, 40))),
                "\u00b2",
                "1_0",
            ),
        ]
    )
    return head("POST", rng.choice(PATHS), ("Content-Length", said)) + body


def chunks(rng: random.Random) -> bytes:
    body = right().split(b"\r\n\r\n", 1)[1]
    sizes = [
        f"{len(body):x}",
        f"{len(body):X};ext=" + "e" * rng.randrange(20_000),
        "-1",
        "zz",
        "f" * 17,
        "",
        "0",
    ]
    part = rng.choice(sizes).encode() + b"\r\n" + body + rng.choice([b"\r\n", b"", b"\n", b"\0\0"])
    end = rng.choice(
        [b"0\r\n\r\n", b"", b"0\r\n", b"0\r\nX-Trailer: " + b"t" * rng.randrange(9000) + b"\r\n\r\n"]
    )
    kind = rng.choice(["chunked", "chunked, chunked", "gzip, chunked", "xchunked", "identity", "chunked "])
    return head("POST", rng.choice(PATHS), ("Transfer-Encoding", kind)) + part + end


def smuggled(rng: random.Random) -> bytes:
    """A second request hidden by two lengths that disagree."""
    hidden = kept(head("GET", "/v1/models"))
    first = rng.choice(
        [("Content-Length", "5"), ("Content-Length", str(len(hidden))), ("Content-Length", "0")]
    )
    fields = [first, ("Transfer-Encoding", rng.choice(["chunked", "chunKed", "\tchunked", "x"]))]
    rng.shuffle(fields)
    return (
        kept(head("POST", CHAT, *fields))
        + rng.choice([b"0\r\n\r\n", b"1\r\nZ\r\n0\r\n\r\n", b"5\r\n{}   \r\n"])
        + hidden
    )


def invalid_text(rng: random.Random) -> bytes:
    body = bytearray(right().split(b"\r\n\r\n", 1)[1])
    for _ in range(rng.randrange(1, 8)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return posted(rng, bytes(body))


def half_characters(rng: random.Random) -> bytes:
    text = rng.choice(['"\\ud800"', '"\\udfff x"', '"\\u0000"', '"\xff"', '"\ufeff"', '"\\q"', "'x'"])
    said = f'{{"messages": [{{"role": "user", "content": {text}}}], {text}: {text}, "prompt": {text}}}'
    return posted(rng, said.encode("utf-8"))


def nested(rng: random.Random) -> bytes:
    depth = rng.choice([50, 500, 990, 5000, 100_000])
    begin, end = rng.choice([(b"[", b"]"), (b'{"a":', b"}"), (b'[{"messages":', b"}]")])
    inside = begin * depth + b"1" + end * depth * rng.randrange(2)
    return posted(rng, rng.choice([inside, b'{"messages": %s, "prompt": %s}' % (inside, inside)]))


def numbers(rng: random.Random) -> bytes:
    number = rng.choice(
        [
            *(
                "9" * rng.randrange(20, 9000),
                "-" + "9" * 5000,
                "1e999",
                "-1e999",
                "NaN",
                "Infinity",
                "1e-9999",
            ),
            *("0.1" + "0" * 9000 + "1", "18446744073709551616", "-0", "1E400000000", "00", "0x10", "1_000"),
        ]
    )
    name = rng.choice(
        [
            "max_tokens",
            "temperature",
            "seed",
            "n",
            "top_p",
            "top_k",
            "logprobs",
            "min_p",
            "n_predict",
            "num_ctx",
        ]
    )
    said = f'{{"messages": [{{"role": "user", "content": "say x"}}], "prompt": "say x", "{name}": {number}}}'
    return posted(rng, said.encode())


def wrong_types(rng: random.Random) -> bytes:
    values: Sequence[object] = (
        None,
        1,
        -1,
        "",
        "x",
        [],
        {},
        [[]],
        [{}],
        True,
        {"type": "x"},
        [None],
        1.5,
        "\0",
    )
    names = ["model", "messages", "prompt", "input", "tools", "tool_choice", "stop", "stream", "system"]
    names += ["response_format", "logit_bias", "format"]
    body = {name: rng.choice(values) for name in rng.sample(names, rng.randrange(1, 6))}
    return posted(rng, json.dumps(rng.choice([body, [body], body, "x", None])).encode())


def upgrades(rng: random.Random) -> bytes:
    to = rng.choice(["websocket", "h2c", "TLS/1.0", "x" * 5000, "websocket, h2c"])
    more = [("Upgrade", to), ("Connection", rng.choice(["Upgrade", "Upgrade, HTTP2-Settings", "close"]))]
    more += [("Sec-WebSocket-Key", "x" * rng.randrange(40)), ("HTTP2-Settings", "AAMAAABkAAQAAP__")]
    return rng.choice([head("GET", rng.choice(OTHER_PATHS), *more), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])


def pipelined(rng: random.Random) -> bytes:
    makers: Sequence[Maker] = (
        wrong_types,
        invalid_text,
        lambda rng: right(),
        lambda rng: head("GET", "/health"),
    )
    return b"".join(kept(rng.choice(makers)(rng)) for _ in range(rng.randrange(2, 12)))


def garbage(rng: random.Random) -> bytes:
    first = rng.choice(
        [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\r\n" * 500, b"\0" * 64, b"SSH-2.0-x\r\n"]
    )
    return first + rng.randbytes(rng.randrange(1, 3000))


def mutated(rng: random.Random) -> bytes:
    """A right request with bytes changed, cut out, or put in twice."""
    data = bytearray(right(stream=rng.random() < 0.5))
    for _ in range(rng.randrange(1, 5)):
        at, length = rng.randrange(len(data)), rng.randrange(1, 20)
        match rng.randrange(3):
            case 0:
                data[at] = rng.randrange(256)
            case 1 if len(data) > 40:
                del data[at : at + length]
            case _:
                data[at:at] = data[at : at + length]
    return bytes(data)


MAKERS: Sequence[Maker] = (
    *(request_lines, header_floods, long_headers, odd_headers, wrong_lengths, chunks, smuggled, invalid_text),
    *(half_characters, nested, numbers, wrong_types, upgrades, pipelined, garbage, mutated),
)


def request_of(rng: random.Random) -> FuzzedRequest:
    """The next one."""
    make = rng.choice(MAKERS)
    data = make(rng)
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data) + 1)]  # cut: the rest never comes
    slow = rng.random() < 0.1 and len(data) < 2000
    pieces = len(data) // 8 + 1 if slow else rng.choice([1, 1, 1, 2, 5])
    return FuzzedRequest(make.__name__, data, pieces, hangs_up=rng.random() < 0.1)


# --- the server, and what it did


@dataclass
class FuzzTotals:
    """What became of all requests."""

    requests: int = 0
    bursts: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    closed: int = 0  # without an answer

    def to_text(self) -> str:
        said = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        return f"{self.requests} requests in {self.bursts} bursts: {said}; closed, no answer: {self.closed}"


class KeptRecords(logging.Handler):
    """Everything that is logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.getMessage().startswith(EXPECTED):
            self.lines.append(self.format(record))


class FuzzedServer:
    """The server under test."""

    def __init__(self, engine: FakeEngine, port: int, records: KeptRecords) -> None:
        self.totals = FuzzTotals()
        self._engine, self._port, self._records = engine, port, records
        self._descriptors = self._tasks = self._memory = 0

    async def settle(self) -> None:
        """What there is when nothing is asked; called once the first requests have been answered."""
        await self.answer_right_requests()
        await asyncio.sleep(0.2)
        self._descriptors, self._tasks, self._memory = descriptors(), len(asyncio.all_tasks()), memory()

    async def burst(self, seed: int, count: int = BURST) -> None:
        """One burst, and everything that has to hold after it."""
        rng = random.Random(seed)
        requests = [request_of(rng) for _ in range(count)]
        for begin in range(0, count, AT_ONCE):
            found = await asyncio.gather(*map(self._send, requests[begin : begin + AT_ONCE]))
            for request, answer in zip(requests[begin : begin + AT_ONCE], found, strict=True):
                self._look_at(request, answer, seed)
        self.totals.bursts += 1
        await self.answer_right_requests()
        await self._check_left(seed)

    async def answer_right_requests(self) -> None:
        """A right request gets its answer, alone on its connection."""
        answer = await self._send(FuzzedRequest("right", right()))
        assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]
        assert b'"hello"' in answer, answer[-300:]

    async def _send(self, request: FuzzedRequest) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        reading = asyncio.create_task(self._read(reader))
        try:
            step = -(-len(request.data) // request.pieces) or 1
            for begin in range(0, len(request.data), step):
                writer.write(request.data[begin : begin + step])
                await writer.drain()
                if request.pieces > 1:
                    await asyncio.sleep(SLOW_S)
            if request.hangs_up:
                reading.cancel()
                return b""
            return await reading
        except (ConnectionError, asyncio.CancelledError):  # it has heard enough
            return b"" if request.hangs_up else await reading
        finally:
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        """All that comes until the server closes, or has nothing more to say."""
        found = bytearray()
        async with asyncio.timeout(ANSWER_S):
            while True:
                try:
                    async with asyncio.timeout(QUIET_S):
                        part = await reader.read(1 << 16)
                except TimeoutError:
                    # It waits for the rest of a request, or it is busy with one.
                    if self._engine.idle.is_set():
                        return bytes(found)
                    continue
                except ConnectionError:
                    return bytes(found)
                if not part:
                    return bytes(found)
                found += part

    def _look_at(self, request: FuzzedRequest, answer: bytes, seed: int) -> None:
        self.totals.requests += 1
        statuses = [int(status) for status in STATUS.findall(answer)]
        self.totals.statuses.update(statuses)
        self.totals.closed += not statuses
        worst = max(statuses, default=0)
        # 501 and 503 are answers in words: what is not supported, and a place that is taken.
        assert worst < 500 or worst in (501, 503), (
            f"seed {seed}, {request.kind}: {request.data[:500]!r}: {answer[:500]!r}"
        )
        if b"Traceback" in answer:
            raise AssertionError(
                f"seed {seed}, {request.kind}: {request.data[:500]!r}: a traceback in the answer"
            )

    async def _check_left(self, seed: int) -> None:
        """Nothing of the burst is left, after a moment for what is being closed."""
        until = time.monotonic() + ANSWER_S
        while (left := self._left()) and time.monotonic() < until:
            gc.collect()
            await asyncio.sleep(0.02)
        assert not left, f"seed {seed}: {left}"
        assert not self._records.lines, f"seed {seed}: {self._records.lines[0]}"
        grown = memory() - self._memory
        assert grown < MOST_GROWTH, f"seed {seed}: {grown >> 20} MiB more than at the start"

    def _left(self) -> str:
        open_now, tasks = descriptors(), len(asyncio.all_tasks())
        if open_now > self._descriptors:
            return f"{open_now} descriptors, and {self._descriptors} at the start"
        if tasks > self._tasks:
            return f"{tasks} tasks, and {self._tasks} at the start"
        return "" if self._engine.idle.is_set() else "the engine has a request"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[1]) * resource.getpagesize()


@asynccontextmanager
async def fuzzed_server() -> AsyncIterator[FuzzedServer]:
    """A server on a port of this machine, with a scripted engine."""
    records, engine = KeptRecords(), FakeEngine()
    stop, started = asyncio.Event(), asyncio.Event()
    address = listen.ListenAddress(port=0)
    logging.getLogger().addHandler(records)
    try:
        with listen.listening(address) as bound:
            app = create_app(LocalClient(engine), hosts=address.hosts(()))
            running = asyncio.create_task(listen.serve(app, bound, stop, started.set))
            await started.wait()
            server = FuzzedServer(engine, bound.getsockname()[1], records)
            await server.settle()
            yield server
            stop.set()
            await asyncio.wait_for(running, 20)
    finally:
        logging.getLogger().removeHandler(records)
        engine.close()


async def run(seed: int, seconds: float) -> None:
    """Bursts for so long, each with a seed of its own."""
    until = time.monotonic() + seconds
    threads = threading.active_count()
    async with fuzzed_server() as server:
        while time.monotonic() < until:
            await server.burst(seed)
            seed += 1
        print(server.totals.to_text(), f"; {threading.active_count() - threads} more threads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    asyncio.run(run(given.seed, given.seconds))


if __name__ == "__main__":
    main()
