"""What the server says of itself: plan, props, slots, metrics; and what it does not have."""

from __future__ import annotations

import re

import httpx
import pytest

from hetrun.client.engine_client import LocalClient, WorkerClient
from hetrun.config import Settings
from hetrun.server.anthropic_format.errors import is_here
from hetrun.server.app import create_app
from hetrun.server.routes import unsupported
from hetrun.server.routes.metrics import Metric, label, text
from tests.server.test_api import CHAT, asking, error_of
from tests.support.fakes import ENDLESS, FakeEngine

LINE = re.compile(r'hetrun_[a-z_]+(\{[a-z_]+="[^"\n]*"(,[a-z_]+="[^"\n]*")*\})? [0-9.e+-]+')


def app_client(engine: FakeEngine, **options: object) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(LocalClient(engine), **options))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    response = await http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4"
    lines = [line for line in response.text.splitlines() if not line.startswith("#")]
    assert all(LINE.fullmatch(line) for line in lines), response.text
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_the_plan(http: httpx.AsyncClient) -> None:
    assert (await http.get("/plan")).json() == {"format": 3, "plans": []}


async def test_props_say_what_holds_for_requests(engine: FakeEngine) -> None:
    async with app_client(engine, sampling={"top_k": 3, "temperature": 0.5}) as http:
        said = (await http.get("/props")).json()
    settings = said["default_generation_settings"]
    assert settings["n_ctx"] == 2048
    assert (settings["params"]["top_k"], settings["params"]["temperature"]) == (3, 0.5)
    assert "logit_bias" not in settings["params"]
    assert (said["total_slots"], said["model_alias"], said["model_path"]) == (64, "fake", "fake.gguf")
    assert said["chat_template"] == "{{ messages }}"
    assert "/models/" not in str(said)


async def test_a_slot_for_each_place_and_each_request_that_waits(http: httpx.AsyncClient) -> None:
    *places, waiting = (await http.get("/slots")).json()
    assert [slot["id"] for slot in places] == list(range(64))
    assert {slot["state"] for slot in places if slot["id"] != 1} == {"idle"}
    assert places[1] == {
        "id": 1,
        "id_task": 7,
        "n_ctx": 2048,
        "is_processing": True,
        "state": "answer",
        "seconds": 1.5,
        "n_prompt_tokens": 10,
        "n_prompt_tokens_processed": 10,
        "n_prompt_tokens_cache": 4,
        "n_decoded": 3,
        "n_remain": 97,
    }
    assert (waiting["id"], waiting["id_task"], waiting["state"]) == (-1, 8, "waiting")
    assert not waiting["is_processing"]


async def test_metrics_of_the_engine_and_of_the_server(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    await http.post(CHAT, json=asking())
    await http.post(CHAT, json=asking(temperature="hot"))
    found = await metrics(http)
    assert found["hetrun_up"] == 1
    assert found['hetrun_http_requests_total{status="200"}'] == 1
    assert found['hetrun_http_requests_total{status="400"}'] == 1
    assert found["hetrun_http_requests_open"] == 1  # this one
    assert found["hetrun_http_request_seconds_count"] == 2
    assert found['hetrun_model_info{name="fake",architecture="llama"}'] == 1
    assert found['hetrun_requests_total{end="stop"}'] == 2
    assert found['hetrun_requests{state="waiting"}'] == 1
    assert found["hetrun_kv_tokens"] == 13
    assert found["hetrun_accepted_tokens_total"] == 6
    assert found["hetrun_first_token_seconds_sum"] == 0.25
    assert "hetrun_budget_bytes" not in found
    engine.options["ram"] = 5 << 20
    found = await metrics(http)
    assert found["hetrun_budget_bytes"] == 5 << 20
    assert found["hetrun_streaming_bytes_total"] == 300


async def test_metrics_while_there_is_no_engine() -> None:
    client = WorkerClient(
        Settings.resolve(environ={}, model=ENDLESS), engine="tests.support.fakes:FakeEngine"
    )
    try:
        transport = httpx.ASGITransport(create_app(client))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            found = await metrics(http)
            assert found["hetrun_up"] == 0
            assert "hetrun_places" not in found
    finally:
        await client.close()


def test_labels_are_escaped() -> None:
    metric = Metric("x", "gauge", "X.", {label("model", 'a"b\\c\nd'): 1.5})
    assert text([metric]).splitlines()[-1] == 'hetrun_x{model="a\\"b\\\\c\\nd"} 1.5'


@pytest.mark.parametrize("path", list(unsupported.REFUSED))
async def test_what_others_have_is_refused_in_a_sentence(http: httpx.AsyncClient, path: str) -> None:
    path = re.sub(r"\{.*\}", "1/x" if ":path" in path else "1", path)
    for method in ("GET", "POST"):
        response = await http.request(method, path)
        assert response.status_code == 501
        assert response.headers["x-should-retry"] == "false"
        if path.startswith("/api/"):  # Ollama's, with errors in its shape
            said = response.json()["error"]
        elif is_here(path):  # Anthropic's, too
            said = response.json()["error"]["message"]
        else:
            assert error_of(response)["code"] == "not_supported"
            said = error_of(response)["message"]
        assert not said.endswith(".")


async def test_other_names_of_the_same(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/health")).json() == (await http.get("/health")).json()
    assert (await http.get("/models")).json() == (await http.get("/v1/models")).json()
    assert (await http.get("/nowhere")).status_code == 404


@pytest.mark.parametrize(
    "path", ["/plan", "/props", "/slots", "/metrics", "/tokenizer_info", "/v1/models", "/api/tags"]
)
async def test_only_health_needs_no_key(engine: FakeEngine, path: str) -> None:
    async with app_client(engine, api_key="secret") as http:
        assert (await http.get(path)).status_code == 401
        assert (await http.get(path, headers={"X-Api-Key": "secret"})).status_code in (200, 501)
        assert (await http.get("/v1/health")).status_code == 200
