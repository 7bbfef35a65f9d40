"""Real sockets: what an in-process app cannot show."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.errors import OptionError
from hetrun.server import listen
from hetrun.server.app import create_app
from hetrun.server.listen import Address, bind, check_exposure, serve, stop_on_signals, url
from tests.support.fakes import FakeEngine

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def served(engine: FakeEngine, address: Address) -> AsyncIterator[httpx.AsyncClient]:
    stop, started = asyncio.Event(), asyncio.Event()
    transport = httpx.AsyncHTTPTransport(uds=str(address.uds) if address.uds else None)
    with listen.listening(address) as bound:
        base = "http://localhost" if address.uds else url(bound)
        running = asyncio.create_task(serve(create_app(LocalClient(engine)), bound, stop, started.set))
        await started.wait()
        async with httpx.AsyncClient(transport=transport, base_url=base) as http:
            yield http
        stop.set()
        await asyncio.wait_for(running, 10)


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    return Address(port=0) if request.param == "tcp" else Address(uds=tmp_path / "hetrun.sock")


def asking(text: str, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **more}


async def test_answers_come_as_they_are_made(engine: FakeEngine, address: Address) -> None:
    async with served(engine, address) as http:
        if address.uds is not None:
            assert stat.S_IMODE(address.uds.stat().st_mode) == 0o600
        async with http.stream("POST", CHAT, json=asking("forever", stream=True)) as response:
            lines = (line async for line in response.aiter_lines() if line)
            first = json.loads((await anext(lines)).removeprefix("data: "))
            assert first["choices"][0]["delta"]["role"] == "assistant"
            second = json.loads((await anext(lines)).removeprefix("data: "))
            assert second["choices"][0]["delta"]["content"] == "ha "
            # It would go on for ever: another one is answered beside it.
            other = await http.post(CHAT, json=asking("say hello"))
            assert other.json()["choices"][0]["message"]["content"] == "hello"
            await lines.aclose()
        # Leaving the stream hung up, which cancels.
        assert await asyncio.to_thread(engine.idle.wait, 5)
        assert engine.cancelled == [1]
    assert address.uds is None or not address.uds.exists()


async def test_hanging_up_cancels_an_answer_that_is_not_streamed(engine: FakeEngine) -> None:
    async with served(engine, Address(port=0)) as http:
        asked = asyncio.create_task(http.post(CHAT, json=asking("forever")))
        while not engine.requests:
            await asyncio.sleep(0.001)
        asked.cancel()
        assert await asyncio.to_thread(engine.idle.wait, 5)
        assert engine.cancelled == [1]


async def test_hanging_up_in_the_middle_of_a_request_is_no_failure(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(engine, Address(port=0)) as http:
        _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{" % CHAT.encode())
        await writer.drain()
        writer.close()
        await asyncio.sleep(0.1)
        assert (await http.post(CHAT, json=asking("say hello"))).status_code == 200
    assert not engine.cancelled
    assert caplog.records == []


async def test_a_signal_ends_the_server_and_what_it_answers(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "GRACE_S", 0)
    bound = bind(Address(port=0))
    stop, started = asyncio.Event(), asyncio.Event()
    stop_on_signals(stop)
    running = asyncio.create_task(serve(create_app(LocalClient(engine)), bound, stop, started.set))
    await started.wait()
    reader, writer = await asyncio.open_connection(*bound.getsockname())
    body = json.dumps(asking("forever", stream=True)).encode()
    writer.write(
        b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
    )
    await reader.readuntil(b"ha ")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 10)
    assert await asyncio.to_thread(engine.idle.wait, 5)
    writer.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().remove_signal_handler(number)


def test_a_port_in_use_is_one_sentence() -> None:
    with bind(Address(port=0)) as first:
        first.listen()
        with pytest.raises(OptionError, match=r"cannot listen on 127\.0\.0\.1 port .* Choose another --port"):
            bind(Address(port=first.getsockname()[1]))


@pytest.mark.parametrize("address", [Address("no such host."), Address(port=70_000), Address(port=-1)])
def test_an_address_that_is_none(address: Address) -> None:
    with pytest.raises(OptionError, match=r"is no address to listen on|from 0 to 65535"):
        bind(address)


def test_a_stale_socket_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    bind(Address(uds=path)).close()
    assert path.exists()  # as after kill -9
    with bind(Address(uds=path)) as second:
        second.listen()
        with pytest.raises(OptionError, match="another server listens there"):
            bind(Address(uds=path))
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(OptionError, match="there is a file of this name"):
        bind(Address(uds=tmp_path / "notes.txt"))
    assert (tmp_path / "notes.txt").read_text() == "keep me"
    with pytest.raises(OptionError, match="No such file or directory"):
        bind(Address(uds=tmp_path / "missing" / "x.sock"))
    with pytest.raises(OptionError, match="too long"):
        bind(Address(uds=tmp_path / ("x" * 200)))


@pytest.mark.parametrize(
    ("address", "key", "allowed"),
    [
        (Address(), None, True),
        (Address("localhost"), None, True),
        (Address("::1"), None, True),
        (Address(uds=Path("/x")), None, True),
        (Address("0.0.0.0"), None, False),
        (Address("example.org"), None, False),
        (Address("0.0.0.0"), "", False),
        (Address("0.0.0.0"), "secret", True),
    ],
    ids=str,
)
def test_other_machines_need_a_key(address: Address, key: str | None, allowed: bool) -> None:
    if allowed:
        check_exposure(address, key)
    else:
        with pytest.raises(OptionError, match="--api-key"):
            check_exposure(address, key)


def test_urls(tmp_path: Path) -> None:
    with bind(Address(port=0)) as tcp:
        assert url(tcp) == f"http://127.0.0.1:{tcp.getsockname()[1]}"
    with bind(Address(uds=tmp_path / "s")) as unix:
        assert url(unix) == f"unix:{tmp_path}/s"
    with socket.socket(socket.AF_INET6) as six:
        six.bind(("::1", 0))
        assert url(six) == f"http://[::1]:{six.getsockname()[1]}"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
async def test_a_stream_that_outlasts_the_server_ends_with_an_error(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(listen, "GRACE_S", 0)
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    prompt = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path)
    body: dict[str, object] = {most: 100_000, "stream": True}
    body.update({prompt: "forever"} if prompt else asking("forever"))
    with listen.listening(Address(port=0)) as bound:
        stop, started = asyncio.Event(), asyncio.Event()
        running = asyncio.create_task(serve(create_app(LocalClient(engine)), bound, stop, started.set))
        await started.wait()
        async with (
            httpx.AsyncClient(base_url=url(bound)) as http,
            http.stream("POST", path, json=body) as got,
        ):
            lines = [line async for line in _lines_until_stopped(got, stop)]
        await asyncio.wait_for(running, 10)
    assert "The server is stopping" in lines[-1]
    assert lines[-1].startswith('data: {"error":' if path != "/v1/responses" else "data: ")
    if path == "/v1/responses":
        assert any(line == "event: response.failed" for line in lines)
    assert await asyncio.to_thread(engine.idle.wait, 5)
    assert engine.cancelled == [1]


async def _lines_until_stopped(response: httpx.Response, stop: asyncio.Event) -> AsyncIterator[str]:
    """All lines; the server is asked to stop when the answer has begun. A cut connection would raise."""
    async for line in response.aiter_lines():
        if "ha " in line:
            stop.set()
        if line:
            yield line


async def test_an_answer_that_outlasts_the_server_is_refused_in_words(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listen, "GRACE_S", 0)
    with listen.listening(Address(port=0)) as bound:
        stop, started = asyncio.Event(), asyncio.Event()
        running = asyncio.create_task(serve(create_app(LocalClient(engine)), bound, stop, started.set))
        await started.wait()
        async with httpx.AsyncClient(base_url=url(bound)) as http:
            asked = [
                asyncio.create_task(http.post(CHAT, json=asking(order, **more)))
                for order in ("forever", "silence")
                for more in ({}, {"n": 2}, {"stream": True})
                if (order, more) != ("forever", {"stream": True})
            ]
            while len(engine.requests) < 6:  # of one with n: 2 that is silent only the first choice begins
                await asyncio.sleep(0.001)
            stop.set()
            answers = await asyncio.gather(*asked)
        await asyncio.wait_for(running, 10)
    for answer in answers:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_stopped"
        assert answer.headers["x-should-retry"] == "false"
    assert caplog.records == []


async def test_each_request_is_one_line_of_the_log(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "hetrun"):
        async with served(engine, Address(port=0)) as http:
            await http.post(f"{CHAT}?key=secret", json=asking("say hello"))
            await http.get("/nothing")
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("request_counter")]
    assert len(lines) == 2
    assert re.fullmatch(r'127\.0\.0\.1 "POST /v1/chat/completions" 200 in \d+\.\d{3} s', lines[0])
    assert re.fullmatch(r'127\.0\.0\.1 "GET /nothing" 404 in \d+\.\d{3} s', lines[1])
