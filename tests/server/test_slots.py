"""Slots over HTTP: what is listed of them, and how they are saved and restored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.client.interface import ChatClient
from hetrun.client.model_catalog import CatalogModel
from hetrun.client.model_pool import ModelPool
from hetrun.client.queries import EngineState, SlotAction
from hetrun.server.app import create_app
from hetrun.server.llamacpp.slots import MOST_NAME, described
from tests.server.test_api import CHAT, asking, error_of
from tests.server.test_introspection import app_client
from tests.support.fakes import FakeEngine


@pytest.fixture
async def saving(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with app_client(engine, slot_save_path=tmp_path) as client:
        yield client


async def act(http: httpx.AsyncClient, slot: object, action: str, **body: object) -> httpx.Response:
    return await http.post(f"/slots/{slot}", params={"action": action}, json=body or None)


async def test_a_slot_is_saved_restored_and_erased(saving: httpx.AsyncClient, tmp_path: Path) -> None:
    saved = (await act(saving, 2, "save", filename="mine.bin")).json()
    assert saved.pop("timings")["save_ms"] >= 0
    assert saved == {"id_slot": 2, "filename": "mine.bin", "n_saved": 22, "n_written": 1}
    assert (tmp_path / "mine.bin").read_text() == "2"
    restored = (await act(saving, 0, "restore", filename="mine.bin")).json()
    assert restored.pop("timings")["restore_ms"] >= 0
    assert restored == {"id_slot": 0, "filename": "mine.bin", "n_restored": 20, "n_read": 1}
    assert (await act(saving, 1, "erase")).json() == {"id_slot": 1, "n_erased": 21}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../mine",
            "a/b",
            "a\\b",
            "..",
            ".",
            ".hidden",
            "",
            "/etc/passwd",
            "a\0b",
            "a\nb",
            5,
            None,
        ),
        "a" * (MOST_NAME + 1),
        "ä" * (MOST_NAME // 2 + 1),
    ],
)
async def test_a_name_is_no_path(
    saving: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, name: object
) -> None:
    monkeypatch.setattr(engine, "act", None)  # the engine is not asked
    for action in ("save", "restore"):
        refused = await saving.post(f"/slots/0?action={action}", json={"filename": name})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "filename")


@pytest.mark.parametrize(
    ("slot", "action", "status", "param"),
    [
        ("0", "restore", 400, "filename"),  # there is none
        ("3", "save", 429, None),  # it answers now
        ("-1", "save", 400, "id_slot"),
        ("one", "save", 400, "id_slot"),
        ("1e3", "erase", 400, "id_slot"),
        ("9" * 30, "save", 400, "id_slot"),
        ("0", "drop", 400, "action"),
        ("0", "", 400, "action"),
    ],
)
async def test_what_is_wrong(
    saving: httpx.AsyncClient, slot: str, action: str, status: int, param: str | None
) -> None:
    refused = await act(saving, slot, action, filename="mine")
    assert (refused.status_code, error_of(refused)["param"]) == (status, param)


async def test_without_a_folder_nothing_is_saved(http: httpx.AsyncClient) -> None:
    for action in ("save", "restore", "erase"):
        refused = await act(http, 0, action, filename="mine")
        assert (refused.status_code, error_of(refused)["code"]) == (501, "not_supported")
        assert "--slot-save-path" in error_of(refused)["message"]


async def test_whether_a_slot_is_idle(http: httpx.AsyncClient) -> None:
    assert (await http.get("/slots?fail_on_no_slot=1")).status_code == 200
    state = EngineState({}, (), 0, 2048, None, None)  # type: ignore[arg-type]
    assert described(state) == []


async def test_a_model_that_sleeps_is_described_and_not_woken() -> None:
    engines: list[FakeEngine] = []

    def start(found: CatalogModel, ram: int | None) -> ChatClient:
        engines.append(FakeEngine())
        return LocalClient(engines[-1])

    shelf = ModelPool([CatalogModel("fake", Path("/models/fake.gguf"), 1)], start, idle_s=0.05)
    assert shelf.only
    transport = httpx.ASGITransport(create_app(shelf.only))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        awake = (await http.get("/props")).json()  # which loads it
        used = shelf.only.used_at
        await http.get("/props")
        assert shelf.only.used_at == used  # nor does that keep it awake
        await http.post(CHAT, json=asking())
        async with asyncio.timeout(30):
            while shelf.loaded:
                await asyncio.sleep(0.01)
        loads = len(engines)
        said = (await http.get("/props")).json()
        slots = (await http.get("/slots")).json()
    assert (awake["is_sleeping"], said["is_sleeping"]) == (False, True)
    assert said | {"is_sleeping": False} == awake
    assert said["chat_template"] == "{{ messages }}"
    assert [slot["state"] for slot in slots] == ["idle"] * 64
    assert len(engines) == loads
    assert shelf.only.client is None
    await shelf.close()
    for engine in engines:
        engine.close()


def test_an_action_is_not_repeated_by_the_next_process() -> None:
    """The last one may have died of it."""
    assert not SlotAction.repeatable
