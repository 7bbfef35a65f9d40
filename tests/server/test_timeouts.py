"""Clients that stop: in the middle of a request's head, or of reading. And a server that is told to end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.server import listen
from hetrun.server.app import create_app
from hetrun.server.listen import ListenAddress
from hetrun.server.middleware import timeouts
from tests.server.test_api import CHAT, asking
from tests.support.fakes import FakeEngine
from tests.support.limits import Within

LOOK_S = 0.05
CUT_S = LOOK_S * (timeouts.MOST_LOOKS + 1)
# A server with a scripted engine in its worker, as the command starts it.
SERVER = """
import sys
from functools import partial
from pathlib import Path
from hetrun.cli import serve as fronts
from hetrun.client.engine_client import WorkerClient
from hetrun.config import Settings
from hetrun.server import listen
listen.GRACE_S = 0.3
fronts.WorkerClient = partial(WorkerClient, engine="tests.support.fakes:FakeEngine")
fronts.serve_forever(Settings.resolve(environ={}, uds=Path(sys.argv[1])), {}, False)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "LOOK_S", LOOK_S)


@asynccontextmanager
async def served(engine: FakeEngine, api_key: str | None = None) -> AsyncIterator[tuple[str, int]]:
    stop, started = asyncio.Event(), asyncio.Event()
    with listen.listening(ListenAddress(port=0)) as bound:
        app = create_app(LocalClient(engine), api_key=api_key)
        running = asyncio.create_task(listen.serve(app, bound, stop, started.set))
        await started.wait()
        yield bound.getsockname()[:2]
        stop.set()
        await asyncio.wait_for(running, 10)


def request(text: str, **more: object) -> bytes:
    body = json.dumps(asking(text, **more)).encode()
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body


@pytest.mark.parametrize("said", [b"", b"POST /v1/chat", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_head_that_is_never_complete(engine: FakeEngine, said: bytes) -> None:
    async with served(engine) as where:
        begin = time.perf_counter()  # before the server's own clock
        reader, writer = await asyncio.open_connection(*where)
        writer.write(said)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        assert time.perf_counter() - begin > LOOK_S
        writer.close()


async def test_a_head_that_trickles_behind_an_answer(engine: FakeEngine) -> None:
    async with served(engine) as where:
        reader, writer = await asyncio.open_connection(*where)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b'{"status":"ok"}')
        with pytest.raises(ConnectionError):  # noqa: PT012 - whichever notices first
            async with asyncio.timeout(10):
                for byte in b"GET /health HTTP/1.1\r\nHost: " + b"x" * 1000:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(LOOK_S / 2)
        writer.close()


async def test_who_waits_long_for_an_answer_is_left_alone(engine: FakeEngine) -> None:
    async with served(engine) as where:
        reader, writer = await asyncio.open_connection(*where)
        writer.write(request("lock 0.7"))
        assert 0.7 > CUT_S
        assert b"free again" in await asyncio.wait_for(reader.readuntil(b"free again"), 10)
        writer.close()


async def test_a_stream_that_is_not_read_is_cut_and_its_request_cancelled(engine: FakeEngine) -> None:
    async with served(engine) as where:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.to_thread(client.connect, tuple(where))
            client.sendall(request("forever " + "many words " * 500, stream=True))
            async with asyncio.timeout(20):
                while not engine.cancelled:
                    await asyncio.sleep(0.01)
            assert await asyncio.to_thread(engine.idle.wait, 5)


async def test_a_slow_reader_has_all_of_it(engine: FakeEngine) -> None:
    async with served(engine) as where:
        reader, writer = await asyncio.open_connection(*where, limit=1 << 12)
        writer.write(request("forever " + "x" * 2000, stream=True, max_tokens=300))
        text = b""
        while not text.endswith(b"0\r\n\r\n"):
            text += await reader.read(1 << 14)
            await asyncio.sleep(LOOK_S / 10)
        assert text.count(b"data: ") == 300 + 3
        assert engine.cancelled == []
        writer.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_in_time_with_clients_still_there(
    tmp_path: Path, number: signal.Signals, within: Within
) -> None:
    path = tmp_path / "socket"
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(path)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    clients = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    try:
        assert process.stderr
        while "Ctrl-C" not in (line := process.stderr.readline()):
            assert line, "the server did not start"
        for client in clients:
            client.settimeout(20)
            client.connect(str(path))
        whole, stream, stopped, headless = clients
        whole.sendall(request("forever"))
        stream.sendall(request("forever", stream=True))
        stopped.sendall(request("forever " + "many words " * 500, stream=True))
        headless.sendall(b"POST /v1/chat")
        assert stream.recv(1 << 16)
        assert stopped.recv(1 << 16)  # and never again
        time.sleep(0.5)
        process.send_signal(number)
        with within(listen.GRACE_S + 6):
            assert process.wait() == 0  # and not in the time of the answers, which go on for ever
        assert not path.exists()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()  # type: ignore[union-attr]
        for client in clients:
            client.close()
