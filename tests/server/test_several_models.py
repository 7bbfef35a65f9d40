"""Several models behind one server: which one a request means, and what is said of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.client.interface import ChatClient
from hetrun.client.model_catalog import CatalogModel
from hetrun.client.model_pool import ModelPool
from hetrun.server.app import create_app
from tests.support.fakes import INFO, FakeEngine

GIB = 1 << 30


def engine(found: CatalogModel, ram: int | None) -> ChatClient:
    fake = FakeEngine()
    fake.info = replace(INFO, path=str(found.path), name=f"{found.name} by Nemo")
    return LocalClient(fake)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    models = [CatalogModel(name, Path(f"/models/{name}.gguf"), GIB) for name in ("large", "small")]
    shelf = ModelPool(models, engine, ram=3 * GIB)
    app = create_app(shelf)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client
    await shelf.close()


def asked(**more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "say hello"}], **more}


async def statuses(http: httpx.AsyncClient) -> dict[str, str]:
    listed = (await http.get("/v1/models")).json()["data"]
    return {model["id"]: model["status"]["value"] for model in listed}


async def test_they_are_loaded_when_they_are_asked_for(http: httpx.AsyncClient) -> None:
    assert await statuses(http) == {"large": "unloaded", "small": "unloaded"}
    for name in ("small", "large.gguf", "small"):
        answer = await http.post("/v1/chat/completions", json=asked(model=name))
        assert answer.status_code == 200
        assert answer.json()["model"] == name.removesuffix(".gguf")
    assert await statuses(http) == {"large": "loaded", "small": "loaded"}
    one = (await http.get("/v1/models/large")).json()
    assert one["meta"]["name"] == "large by Nemo"
    assert (await http.get("/health")).json() == {"status": "ok"}


async def test_one_that_is_not_named(http: httpx.AsyncClient) -> None:
    refused = await http.post("/v1/completions", json={"prompt": "say hello"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "model"
    assert refused.json()["error"]["code"] == "missing_required_parameter"
    await http.post("/v1/completions", json={"prompt": "say hello", "model": "small"})
    answer = await http.post("/v1/completions", json={"prompt": "say hello"})
    assert answer.json()["model"] == "small"  # the one that was used last


async def test_one_that_is_not_there(http: httpx.AsyncClient) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        refused = await http.post(path, json=asked(model="medium", prompt="?"))
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "model_not_found"
        said = "The model 'medium' does not exist here; this server has large, small"
        assert refused.json()["error"]["message"] == said
    assert (await http.get("/v1/models/medium")).status_code == 404
    wrong = await http.post("/v1/chat/completions", json=asked(model=7))
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "model"


async def test_the_budget_of_all(http: httpx.AsyncClient) -> None:
    for name in ("small", "large"):
        await http.post("/v1/chat/completions", json=asked(model=name))
    answer = await http.post("/v1/ram", json={"ram": "2GiB"})
    assert answer.status_code == 200
    shares = answer.json()["memory"]
    assert list(shares) == ["large"]  # with the other one it would be too much: who was used last stays
    assert GIB < shares["large"] <= 2 * GIB
    assert await statuses(http) == {"large": "loaded", "small": "unloaded"}


async def test_what_is_asked_of_one_of_them(http: httpx.AsyncClient) -> None:
    refused = await http.post("/tokenize", json={"content": "hello"})
    assert refused.json()["error"]["param"] == "model"
    answer = await http.post("/tokenize", json={"content": "hello", "model": "small"})
    assert answer.status_code == 200
    assert (await http.get("/slots", params={"model": "large"})).json() == []  # it is not loaded for that
    assert await statuses(http) == {"large": "unloaded", "small": "loaded"}
    assert (await http.get("/props", params={"model": "large"})).json()["model_alias"] == "large"
    text = (await http.get("/metrics")).text
    for name in ("large", "small"):
        assert f'hetrun_places{{model="{name}"}} ' in text
        assert f'hetrun_step_seconds_count{{model="{name}"}} ' in text
    assert text.count("# TYPE hetrun_places ") == 1
