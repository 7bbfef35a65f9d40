"""Refusals reach clients that are still sending, or went on to send before they look."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from hetrun.server.body import MAX_BYTES
from hetrun.server.middleware import drain
from tests.server.test_api import CHAT
from tests.server.test_timeouts import served
from tests.support.fakes import FakeEngine
from tests.support.limits import Within

SIZE = MAX_BYTES + 1


def answer(where: tuple[str, int], path: str, size: int, headers: str = "", sent: int | None = None) -> bytes:
    """What a client reads that sends all of its body first."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Length: {size}\r\n{headers}\r\n"
    with socket.create_connection(where, timeout=20) as client:
        client.sendall(head.encode())
        client.sendall(bytes(size if sent is None else sent))
        pieces = []
        while piece := client.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (CHAT, "Authorization: Bearer right\r\n", b"413"),
        (CHAT, "Authorization: Bearer wrong\r\n", b"401"),
        (CHAT, "Authorization: Bearer right\r\nOrigin: http://stranger.example\r\n", b"403"),
        ("/v1/nowhere", "Authorization: Bearer right\r\n", b"404"),
        ("/health", "Authorization: Bearer right\r\n", b"405"),
    ],
)
async def test_who_sends_all_first_reads_the_refusal(
    engine: FakeEngine, path: str, headers: str, status: bytes
) -> None:
    async with served(engine, "right") as where:
        for _ in range(5):  # a race, so more than once
            got = await asyncio.to_thread(answer, where, path, SIZE, headers)
            assert got.split(b" ")[1] == status
            assert got.endswith(b"}")


async def test_who_never_sends_the_rest_is_not_waited_for(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.setattr(drain, "MOST_S", 0.2)
    async with served(engine) as where:
        begin = time.monotonic()  # before the server's own clock
        with within(10):
            got = await asyncio.to_thread(answer, where, CHAT, SIZE, "", 100)
        assert got.split(b" ")[1] == b"413"
        assert time.monotonic() - begin >= 0.2


async def test_what_is_sent_without_end_is_not_read_without_end(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "MOST_S", 0.01)
    async with served(engine) as where:
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await asyncio.to_thread(answer, where, CHAT, 1 << 40, "", 1 << 28)
