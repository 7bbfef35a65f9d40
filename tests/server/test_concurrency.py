"""Who asks and until when, what too much is answered with, and how much the server holds at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from hetrun.client.engine_client import LocalClient
from hetrun.errors import DeadlineExceeded, HetrunError, Overloaded
from hetrun.server import body, response_driver
from hetrun.server.app import create_app
from hetrun.server.errors import api_error
from hetrun.server.middleware import concurrency
from tests.server.test_api import CHAT, asking, error_of
from tests.support.fakes import FakeEngine


def app_client(engine: FakeEngine, address: str = "10.0.0.1", most_requests: int = 8) -> httpx.AsyncClient:
    app = create_app(LocalClient(engine), most_requests=most_requests)
    transport = httpx.ASGITransport(app, client=(address, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


# --- who asks, and until when


async def test_priority_and_deadline_reach_the_engine(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    await http.post(CHAT, json=asking())
    await http.post(CHAT, json=asking(priority=-3, deadline_s=7))
    await http.post(CHAT, json=asking(priority=None, deadline_s=None))
    found = [(request.priority, request.deadline_s) for request in engine.requests]
    assert found == [(0, None), (-3, 7.0), (0, None)]


async def test_clients_are_told_apart(engine: FakeEngine) -> None:
    async def client(
        fields: Mapping[str, object], headers: Mapping[str, str] = {}, address: str = "10.0.0.1"
    ) -> str:
        async with app_client(engine, address) as http:
            response = await http.post(CHAT, json=asking() | dict(fields), headers=headers)
        assert response.status_code == 200
        return engine.requests[-1].client

    ann, key = {"user": "ann"}, {"Authorization": "Bearer secret"}
    alone = await client({})
    different = [
        alone,
        await client({}, address="10.0.0.2"),
        await client({}, key),
        await client(ann),
        await client({"user": "10.0.0.1"}),
        await client(ann, key),
    ]
    assert len(set(different)) == len(different)
    assert all(len(name) == 16 for name in different)
    assert "secret" not in "".join(different)
    assert await client({"temperature": 0}) == alone
    assert await client(ann, address="10.0.0.2") == await client({"safety_identifier": "ann"})
    assert await client({"safety_identifier": "ann", "user": "bob"}) == await client(ann)


async def test_a_unix_socket_has_no_address(engine: FakeEngine) -> None:
    app = create_app(LocalClient(engine))

    async def without(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "client": None}, receive, send)

    transport = httpx.ASGITransport(cast("Any", without))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.post(CHAT, json=asking())).status_code == 200
    assert engine.requests[0].client


# --- what too much is answered with


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "headers"),
    [
        (Overloaded("full", 2.1), 429, "overloaded", {"retry-after": "3", "retry-after-ms": "2100"}),
        (Overloaded("never"), 429, "overloaded", {"x-should-retry": "false"}),
        (DeadlineExceeded("late"), 504, "deadline_exceeded", {"x-should-retry": "false"}),
    ],
)
async def test_what_comes_too_much_or_too_late(
    http: httpx.AsyncClient,
    engine: FakeEngine,
    stream: bool,
    error: HetrunError,
    status: int,
    code: str,
    headers: Mapping[str, str],
) -> None:
    engine.refusals = [error]
    response = await http.post(CHAT, json=asking(stream=stream))
    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert error_of(response)["message"] == str(error)
    hints = ("retry-after", "retry-after-ms", "x-should-retry")
    assert {name: value for name, value in response.headers.items() if name in hints} == headers


def test_a_time_to_come_again_is_never_nothing() -> None:
    headers = api_error(Overloaded("full", 0.0001)).headers
    assert headers is not None
    assert (headers["Retry-After"], headers["retry-after-ms"]) == ("1", "1")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_passes_also_where_no_engine_answers(
    http: httpx.AsyncClient, engine: FakeEngine, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_driver, "LATE_S", 0.0)
    response = await http.post(CHAT, json=asking("silence", stream=stream, deadline_s=0.01))
    assert response.status_code == 504
    assert error_of(response)["code"] == "deadline_exceeded"
    assert engine.cancelled == [1]


# --- how much is held


async def held(engine: FakeEngine, number: int) -> None:
    while len(engine.requests) < number:
        await asyncio.sleep(0)


async def test_requests_beyond_the_limit_are_refused_unread(engine: FakeEngine) -> None:
    async with app_client(engine, most_requests=2) as http:
        asked = [asyncio.create_task(http.post(CHAT, json=asking("forever"))) for _ in range(2)]
        await held(engine, 2)
        response = await http.post(CHAT, content=b"not even JSON")
        assert response.status_code == 429
        assert "2 requests are in progress already" in error_of(response)["message"]
        assert response.headers["retry-after"] == "5"
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 200
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert (await http.post(CHAT, json=asking("say hello"))).status_code == 200


async def test_bytes_beyond_the_limit_are_refused(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "MOST_BYTES", 1000)
    async with app_client(engine) as http:
        asked = asyncio.create_task(http.post(CHAT, json=asking("forever " + "x" * 600)))
        await held(engine, 1)
        response = await http.post(CHAT, json=asking("say " + "x" * 600))
        assert response.status_code == 429
        assert "of requests are in progress already" in error_of(response)["message"]
        assert (await http.post(CHAT, json=asking("say hello"))).status_code == 200  # a small one
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert (await http.post(CHAT, json=asking("say " + "x" * 600))).status_code == 200


async def test_half_a_body_and_silence(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MOST_S", 0.01)

    async def silent() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    response = await http.post(CHAT, content=silent())
    assert response.status_code == 408
    assert error_of(response)["code"] == "request_timeout"
