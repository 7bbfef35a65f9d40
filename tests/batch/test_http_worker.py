"""Servers that answer for a batch: over TCP and sockets, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hetrun.client import address as addresses
from hetrun.client.address import Address
from hetrun.errors import OptionError
from hetrun.tools.batch.http_worker import Worker
from hetrun.tools.batch.request_lines import CHAT, Ask
from hetrun.tools.batch.worker import Away

ASK = Ask(0, 1, "0" * 12, "own", CHAT, {"messages": []})
Script = Callable[["Talk"], Awaitable[None]]


class Talk:
    """One connection, from the server's side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def request(self) -> tuple[str, dict[str, str], bytes]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        return first, headers, await self._reader.readexactly(int(headers["content-length"]))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def answer(self, body: bytes, status: str = "200 OK", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
        self.send("\r\n".join([*lines, "", ""]).encode() + body)

    def hang_up(self) -> None:
        self._writer.close()


def address(url: str) -> Address:
    return addresses.address(url, "--workers")


@asynccontextmanager
async def server(tmp_path: Path, *scripts: Script) -> AsyncIterator[Worker]:
    """Each connection is the next script's; more than that are refused."""
    left = list(scripts)

    async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = Talk(reader, writer)
        if left:
            await left.pop(0)(talk)
        talk.hang_up()

    path = str(tmp_path / "socket")
    worker = Worker(address(f"unix:{path}"), "secret")
    async with await asyncio.start_unix_server(met, path):
        yield worker
        await worker.close()


def talk(tmp_path: Path, work: Callable[[Worker], Awaitable[None]], *scripts: Script) -> None:
    async def both() -> None:
        async with server(tmp_path, *scripts) as worker:
            await work(worker)

    asyncio.run(both())


def test_addresses() -> None:
    assert address("host:8080") == Address("host:8080", "", "host", 8080)
    assert address("http://h") == Address("http://h", "", "h", 80)
    assert address("https://h/v1/") == Address("https://h/v1/", "", "h", 443, True)
    assert address("http://h:1/a/v1") == Address("http://h:1/a/v1", "", "h", 1, False, "/a")
    assert address("http://[::1]:9").host == "::1"
    assert address("unix:/a b").socket == address("unix:///a b").socket == "/a b"


@pytest.mark.parametrize(
    "url", ["ftp://h", "http://", "http://h:99999", "http://h?a=b", "unix:", "http://[::1", "http://u@h"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(OptionError, match="--workers"):
        address(url)


def test_a_connection_is_kept_and_the_key_is_sent(tmp_path: Path) -> None:
    async def script(talk: Talk) -> None:
        for number in range(3):
            first, headers, body = await talk.request()
            assert first == "POST /v1/chat/completions HTTP/1.1"
            assert headers["authorization"] == "Bearer secret"
            assert json.loads(body) == {"messages": []}
            if number:
                talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
            else:
                talk.answer(b'{"a": 1}')

    async def work(worker: Worker) -> None:
        assert [(await worker.answer(ASK)).body for _ in range(3)] == [b'{"a": 1}', b"{}", b"{}"]

    talk(tmp_path, work, script)


def test_a_connection_that_was_closed_meanwhile_is_made_anew(tmp_path: Path) -> None:
    async def one(talk: Talk) -> None:
        await talk.request()
        talk.answer(b"{}")

    async def work(worker: Worker) -> None:
        for _ in range(3):
            assert (await worker.answer(ASK)).status == 200
            await asyncio.sleep(0.01)

    talk(tmp_path, work, one, one, one)


async def _breaks_off(talk: Talk) -> None:
    await talk.request()
    talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")


async def _is_no_http(talk: Talk) -> None:
    await talk.request()
    talk.send(b"220 hello\r\n\r\n")


async def _says_nothing(talk: Talk) -> None:
    await talk.request()


@pytest.mark.parametrize("script", [_breaks_off, _is_no_http, _says_nothing])
def test_who_breaks_off_is_away_and_the_request_may_be_to_blame(tmp_path: Path, script: Script) -> None:
    async def work(worker: Worker) -> None:
        with pytest.raises(Away, match="closed the connection: ") as caught:
            await worker.answer(ASK)
        assert not caught.value.blameless

    talk(tmp_path, work, script)


def test_who_is_busy_says_when_to_come_again(tmp_path: Path) -> None:
    async def script(talk: Talk) -> None:
        await talk.request()
        talk.answer(b"{}", "429 Too Many", "Retry-After: 3")
        await talk.request()
        talk.answer(b"{}", "503 Starts", "Retry-After: nonsense")
        await talk.request()
        talk.answer(b"{}", "504 Late", "x-should-retry: false")
        await talk.request()
        talk.answer(b"{}", "400 Wrong")

    async def work(worker: Worker) -> None:
        for after in (3.0, None):
            with pytest.raises(Away, match="answers with status") as caught:
                await worker.answer(ASK)
            assert (caught.value.after_s, caught.value.blameless) == (after, True)
        assert [(await worker.answer(ASK)).status for _ in range(2)] == [504, 400]

    talk(tmp_path, work, script)


def test_an_address_without_a_server(tmp_path: Path) -> None:
    with pytest.raises(Away, match="cannot be reached: ") as caught:
        asyncio.run(Worker(address(f"unix:{tmp_path}/none")).answer(ASK))
    assert caught.value.blameless


def test_an_answer_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetrun.tools.batch.http_worker.MOST_ANSWER", 1 << 20)

    async def script(talk: Talk) -> None:
        await talk.request()
        talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" + b"x" * 65536)
        for _ in range(40):
            talk.send(b"\r\n10000\r\n" + b"x" * 65536)

    async def work(worker: Worker) -> None:
        with pytest.raises(Away, match="larger than 1 MiB"):
            await worker.answer(ASK)

    talk(tmp_path, work, script)


def test_what_a_server_says_of_itself(tmp_path: Path) -> None:
    async def script(talk: Talk) -> None:
        assert (await talk.request())[0] == "GET /props HTTP/1.1"
        talk.answer(b'{"total_slots": 40}')
        assert (await talk.request())[0] == "GET /v1/models HTTP/1.1"
        talk.answer(b'{"data": [{"id": "m"}]}')
        for _ in range(2):
            await talk.request()
            talk.answer(b"<html>no</html>", "404 Not Found")
        await talk.request()
        talk.answer(b"{}", "401 Unauthorized")

    async def work(worker: Worker) -> None:
        assert (await worker.look(), worker.lanes) == ("m", 50)
        worker.lanes = 16
        assert (await worker.look(), worker.lanes) == ("", 16)
        with pytest.raises(OptionError, match="needs a different key: give it with --api-key"):
            await worker.look()

    talk(tmp_path, work, script)
