"""POST /v1/ram, and the budget on its way through the worker's pipe: what is in force, also after a death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from hetrun.client.engine_client import LocalClient, WorkerClient
from hetrun.client.events import GenerateRequest
from hetrun.client.interface import ChatClient
from hetrun.client.queries import SetRam
from hetrun.client.sampling_params import SamplingParams
from hetrun.client.wire_protocol import Patience
from hetrun.config import Settings
from hetrun.errors import BudgetError, EngineStopped, OptionError
from hetrun.server.app import create_app
from tests.support.fakes import DEADLY_RAM, LEAST_RAM, FakeEngine

FAKE = "tests.support.fakes:FakeEngine"
RAM = "/v1/ram"
MIB = 1 << 20
STREAMING = {
    "passes": 3,
    "bytes_read": 300,
    "disk_bytes_s": 2e9,
    "waiting": 0.25,
    "bytes_per_token": 100.0,
    "locked_bytes": 900,
    "streamed_bytes": 100,
    "least": LEAST_RAM,
    "experts": 0,
    "slots": 0,
    "found": 0.0,
    "guessed": 0.0,
}


@asynccontextmanager
async def opened(kind: str, **options: object) -> AsyncIterator[ChatClient]:
    client: ChatClient = (
        LocalClient(FakeEngine(None, **options))  # type: ignore[arg-type]
        if kind == "local"
        else WorkerClient(
            Settings.resolve(environ={}, **options), engine=FAKE, patience=Patience(look=0.02, silent=20)
        )
    )
    try:
        yield client
    finally:
        await client.close()


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


async def said(client: ChatClient, text: str) -> str:
    request = GenerateRequest(SamplingParams(), text=text, whole=True)
    return "".join([event.text async for event in client.stream(request)])


# --- the route


@pytest.mark.parametrize(
    ("ram", "nbytes"), [("1.5GiB", 3 << 29), ("2GB", 2 * 10**9), (5 * MIB, 5 * MIB), ("5242880", 5 * MIB)]
)
async def test_the_new_bill(http: httpx.AsyncClient, engine: FakeEngine, ram: object, nbytes: int) -> None:
    response = await http.post(RAM, json={"ram": ram})
    assert (response.status_code, response.json()) == (
        200,
        {"ram": nbytes, "memory": {"weights": nbytes - 1000, "KV": 1000}},
    )
    assert engine.options == {"ram": nbytes}


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({}, "missing_required_parameter", "ram is missing: say how much memory, as 1.5GiB or in bytes"),
        ({"ram": None}, "missing_required_parameter", "ram is missing"),
        ({"ram": 1.5}, "invalid_type", "ram must be a size as 1.5GiB, or a number of bytes, not float"),
        ({"ram": True}, "invalid_type", "not bool"),
        ({"ram": ["1GiB"]}, "invalid_type", "not list"),
        ({"ram": "much"}, "invalid_value", "ram must be a size such as 2GiB, 1.5G"),
        ({"ram": "-1"}, "invalid_value", "not '-1'"),
        ({"ram": 0}, "invalid_value", "ram must be at least 1 byte, not 0"),
        ({"ram": 1 << 70}, "invalid_value", "ram must be a size"),
        ({"ram": LEAST_RAM - 1}, "budget_too_small", "this model needs at least 1048576"),
    ],
)
async def test_what_is_wrong_is_said(
    http: httpx.AsyncClient, engine: FakeEngine, body: dict[str, object], code: str, message: str
) -> None:
    response = await http.post(RAM, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "ram", code)
    assert message in error["message"]
    assert engine.options == {}


async def test_unknown_fields_other_methods_and_no_json(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await http.post(RAM, json={"ram": "1GiB", "vram": "1GiB"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "vram")
    assert response.json()["error"]["code"] == "unknown_parameter"
    assert (await http.post(RAM, content=b"1GiB")).json()["error"]["code"] == "invalid_json"
    assert (await http.get(RAM)).status_code == 405
    assert engine.options == {}


async def test_a_model_that_cannot_change_is_said(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    def refuse(ram: int) -> None:
        raise OptionError("the memory of this model cannot be changed while it runs")

    engine.set_ram = refuse  # type: ignore[method-assign,assignment]
    response = await http.post(RAM, json={"ram": "1GiB"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_parameter")


async def test_it_needs_the_key(engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(create_app(LocalClient(engine), api_key="secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.post(RAM, json={"ram": "1GiB"})).status_code == 401
        assert engine.options == {}
        headers = {"Authorization": "Bearer secret"}
        assert (await http.post(RAM, json={"ram": "1GiB"}, headers=headers)).status_code == 200


async def test_health_says_what_the_disk_is_like(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}
    await http.post(RAM, json={"ram": 5 * MIB})
    assert (await http.get("/health")).json() == {
        "status": "ok",
        "streaming": STREAMING | {"budget": 5 * MIB},
    }


# --- through the client contract


@pytest.mark.parametrize("kind", ["local", "worker"])
async def test_the_budget_changes_while_answers_run(kind: str) -> None:
    async with opened(kind) as client:
        running = asyncio.create_task(said(client, "say one two three"))
        assert await client.ask(SetRam(5 * MIB)) == {"weights": 5 * MIB - 1000, "KV": 1000}
        assert await running == "one two three"
        assert await said(client, "options") == f"{{'ram': {5 * MIB}}}"
        with pytest.raises(BudgetError, match="this model needs at least 1048576"):
            await client.ask(SetRam(5))
        assert await said(client, "options") == f"{{'ram': {5 * MIB}}}"
        await until(lambda: client.health.streaming is not None)
        assert client.health.streaming
        assert client.health.streaming.budget == 5 * MIB


async def test_of_many_changes_the_last_one_is_in_force() -> None:
    async with opened("worker") as client:
        sizes = [n * MIB for n in range(1, 9)]
        bills = await asyncio.gather(*(client.ask(SetRam(size)) for size in sizes))
        assert [bill["weights"] + 1000 for bill in bills] == sizes
        assert await said(client, "options") == f"{{'ram': {sizes[-1]}}}"


async def test_the_budget_holds_for_the_next_worker() -> None:
    async with opened("worker", ram="3MiB") as client:
        assert isinstance(client, WorkerClient)
        await client.ask(SetRam(7 * MIB))
        with pytest.raises(BudgetError):
            await client.ask(SetRam(5))
        for _ in range(2):
            first = client.pid
            os.kill(first, signal.SIGKILL)
            await until(lambda first=first: client.pid != first)  # type: ignore[misc]
            assert await said(client, "options") == f"{{'ram': {7 * MIB}}}"


async def test_a_worker_that_dies_of_it_comes_back_with_what_it_had() -> None:
    async with opened("worker", ram="3MiB") as client:
        assert isinstance(client, WorkerClient)
        await client.info()
        first = client.pid
        with pytest.raises(EngineStopped, match=r"SIGABRT.*It is being restarted"):
            await client.ask(SetRam(DEADLY_RAM))
        assert await said(client, "options") == f"{{'ram': {3 * MIB}}}"
        assert client.pid != first


async def test_a_change_waits_for_a_worker_and_hears_that_there_is_none() -> None:
    async with opened("worker") as client:
        assert isinstance(client, WorkerClient)
        change = asyncio.create_task(client.ask(SetRam(2 * MIB)))
        assert (await change)["KV"] == 1000  # it had not loaded yet
    with pytest.raises(EngineStopped, match="the engine was closed"):
        await client.ask(SetRam(2 * MIB))


async def test_who_gives_up_waiting_does_no_harm() -> None:
    async with opened("worker") as client:
        await client.info()
        change = asyncio.create_task(client.ask(SetRam(2 * MIB)))
        await asyncio.sleep(0)
        change.cancel()
        with pytest.raises(asyncio.CancelledError):
            await change
        assert (await client.ask(SetRam(4 * MIB)))["weights"] == 4 * MIB - 1000
        assert await said(client, "say fine") == "fine"
