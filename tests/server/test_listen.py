"""Real sockets: what an in-process app cannot show."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from hetrun.cli.serve import port, remarks_in
from hetrun.client.engine_client import LocalClient, WorkerClient
from hetrun.client.model_catalog import CatalogModel
from hetrun.client.model_pool import STOPPED, ModelPool
from hetrun.config import Settings
from hetrun.errors import OptionError
from hetrun.server import listen
from hetrun.server.app import create_app
from hetrun.server.listen import ListenAddress, bind, check_exposure, serve, stop_on_signals, url
from hetrun.server.request_log import RequestLog
from tests.support.fakes import FakeEngine

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def served(engine: FakeEngine, address: ListenAddress) -> AsyncIterator[httpx.AsyncClient]:
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
def address(request: pytest.FixtureRequest, tmp_path: Path) -> ListenAddress:
    return ListenAddress(port=0) if request.param == "tcp" else ListenAddress(uds=tmp_path / "hetrun.sock")


def asking(text: str, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **more}


async def test_answers_come_as_they_are_made(engine: FakeEngine, address: ListenAddress) -> None:
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
    async with served(engine, ListenAddress(port=0)) as http:
        asked = asyncio.create_task(http.post(CHAT, json=asking("forever")))
        while not engine.requests:
            await asyncio.sleep(0.001)
        asked.cancel()
        assert await asyncio.to_thread(engine.idle.wait, 5)
        assert engine.cancelled == [1]


async def test_hanging_up_in_the_middle_of_a_request_is_no_failure(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(engine, ListenAddress(port=0)) as http:
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
    monkeypatch.setattr(listen, "FAREWELL_S", 0)
    bound = bind(ListenAddress(port=0))
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


@pytest.mark.parametrize("stream", [True, False])
async def test_who_is_still_answered_when_it_stops_hears_why(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(listen, "GRACE_S", 0)
    settings = Settings.resolve(environ={})
    found = CatalogModel("fake", Path("/models/fake.gguf"), 1)
    shelf = ModelPool(
        [found], lambda found, ram: WorkerClient(settings, engine="tests.support.fakes:FakeEngine")
    )
    stop, started = asyncio.Event(), asyncio.Event()
    with listen.listening(ListenAddress(port=0)) as bound:
        running = asyncio.create_task(serve(create_app(shelf), bound, stop, started.set, shelf.close))
        await started.wait()
        async with httpx.AsyncClient(base_url=url(bound), timeout=30) as http:
            if stream:
                async with http.stream("POST", CHAT, json=asking("forever", stream=True)) as response:
                    lines = (line async for line in response.aiter_lines() if line)
                    while "ha " not in await anext(lines):
                        pass
                    stop.set()
                    *_, last = [line async for line in lines]
                    error = json.loads(last.removeprefix("data: "))["error"]
            else:
                whole = asyncio.create_task(http.post(CHAT, json=asking("forever")))
                assert shelf.only
                while not shelf.only.users:
                    await asyncio.sleep(0.001)
                stop.set()
                answer = await whole
                assert answer.status_code == 503
                error = answer.json()["error"]
            assert (error["message"], error["code"]) == (STOPPED, "engine_stopped")
            await asyncio.wait_for(running, 20)


@pytest.mark.parametrize(
    ("everything", "paths"), [(False, [CHAT, "/nothing"]), (True, ["/health", CHAT, "/nothing"])]
)
async def test_requests_are_logged_in_one_form(
    engine: FakeEngine, everything: bool, paths: list[str]
) -> None:
    lines: list[str] = []
    log = RequestLog(lines.append, everything=everything)
    transport = httpx.ASGITransport(create_app(LocalClient(engine), log=log))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        await http.get("/health")
        await http.post(CHAT, json=asking("say secret"), params={"key": "secret"})
        await http.get("/nothing%1b[2J")
    log.close()
    assert [line.split()[3].replace("\\x1b[2J", "") for line in lines] == paths
    assert re.fullmatch(r"\d\d:\d\d:\d\d 127\.0\.0\.1 POST \S+ 200 \d+\.\d\d s", lines[-2])
    assert " GET /nothing\\x1b[2J 404 " in lines[-1]
    assert "secret" not in "".join(lines)


async def test_a_log_that_is_not_read_holds_up_no_request(engine: FakeEngine) -> None:
    blocked = threading.Event()

    def write(line: str) -> None:
        blocked.wait()

    log = RequestLog(write)
    transport = httpx.ASGITransport(create_app(LocalClient(engine), log=log))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for _ in range(3):
            assert (await http.post(CHAT, json=asking("say x"))).status_code == 200
    blocked.set()
    log.close()


def test_remarks_that_are_not_read_hold_up_nothing() -> None:
    """Python's and uvicorn's remarks go the same way as the log: one after the other, when it is read."""
    lines: list[str] = []
    blocked = threading.Event()

    def write(line: str) -> None:
        blocked.wait()
        lines.append(line)

    log = RequestLog(write)
    with remarks_in(log):
        try:
            raise ValueError("a mistake")
        except ValueError:
            logging.getLogger("uvicorn.error").exception("a request\x1b failed")
        logging.getLogger("hetrun.engine").warning("more")
        logging.getLogger("hetrun.engine").debug("too much")
        assert not lines
    blocked.set()
    log.close()
    first, *_, last = lines[0].splitlines()
    assert (first, last, lines[1:]) == ("a request\\x1b failed", "ValueError: a mistake", ["more"])


def test_a_port_in_use_is_one_sentence() -> None:
    with bind(ListenAddress(port=0)) as first:
        first.listen()
        with pytest.raises(OptionError, match=r"cannot listen on 127\.0\.0\.1 port .* Choose another --port"):
            bind(ListenAddress(port=first.getsockname()[1]))


@pytest.mark.parametrize(
    "address", [ListenAddress("no such host."), ListenAddress(port=70_000), ListenAddress(port=-1)]
)
def test_an_address_that_is_none(address: ListenAddress) -> None:
    with pytest.raises(OptionError, match=r"is not an address to listen on|from 0 to 65535"):
        bind(address)


def test_a_stale_socket_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    bind(ListenAddress(uds=path)).close()
    assert path.exists()  # as after kill -9
    with bind(ListenAddress(uds=path)) as second:
        second.listen()
        with pytest.raises(OptionError, match="another server listens there"):
            bind(ListenAddress(uds=path))
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(OptionError, match="there is a file of this name"):
        bind(ListenAddress(uds=tmp_path / "notes.txt"))
    assert (tmp_path / "notes.txt").read_text() == "keep me"
    with pytest.raises(OptionError, match="No such file or directory"):
        bind(ListenAddress(uds=tmp_path / "missing" / "x.sock"))
    with pytest.raises(OptionError, match="too long"):
        bind(ListenAddress(uds=tmp_path / ("x" * 200)))


@pytest.mark.parametrize(
    ("address", "key", "allowed"),
    [
        (ListenAddress(), None, True),
        (ListenAddress("localhost"), None, True),
        (ListenAddress("::1"), None, True),
        (ListenAddress(uds=Path("/x")), None, True),
        (ListenAddress("0.0.0.0"), None, False),
        (ListenAddress("example.org"), None, False),
        (ListenAddress("0.0.0.0"), "", False),
        (ListenAddress("0.0.0.0"), "secret", True),
    ],
    ids=str,
)
def test_other_machines_need_a_key(address: ListenAddress, key: str | None, allowed: bool) -> None:
    if allowed:
        check_exposure(address, key)
    else:
        with pytest.raises(OptionError, match="--api-key"):
            check_exposure(address, key)


def test_urls(tmp_path: Path) -> None:
    with bind(ListenAddress(port=0)) as tcp:
        assert url(tcp) == f"http://127.0.0.1:{tcp.getsockname()[1]}"
    with bind(ListenAddress(uds=tmp_path / "s")) as unix:
        assert url(unix) == f"unix:{tmp_path}/s"
    with socket.socket(socket.AF_INET6) as six:
        six.bind(("::1", 0))
        assert url(six) == f"http://[::1]:{six.getsockname()[1]}"


def test_the_port_for_clients_of_ollama() -> None:
    assert port(Settings.resolve()) == 8080
    assert port(Settings.resolve(ollama=True)) == 11434
    assert port(Settings.resolve(ollama=True, port=8080)) == 8080
    assert port(Settings.resolve(environ={"HETRUN_OLLAMA": "1"})) == 11434
    assert port(Settings.resolve(environ={"HETRUN_OLLAMA": "1", "HETRUN_PORT": "9000"})) == 9000
