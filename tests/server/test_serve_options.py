"""What `hetrun serve` says once for all requests: the model's names, a seed, a limit of answers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from hetrun.cli.serve import remark_on_kubernetes, serve_forever, shelf_of, usual_sampling
from hetrun.client.engine_client import LocalClient
from hetrun.config import Settings
from hetrun.errors import OptionError
from hetrun.server.app import create_app
from tests.server.test_api import CHAT, asking, error_of
from tests.support.fakes import FakeEngine

NAMES = ("gpt-4o", "org/model")


def app_client(engine: FakeEngine, **options: object) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(LocalClient(engine), **options))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
async def named(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with app_client(engine, aliases=NAMES, strict=True) as http:
        yield http


async def test_each_name_is_listed_and_found(named: httpx.AsyncClient) -> None:
    listed = (await named.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == list(NAMES)
    assert all(model["aliases"] == list(NAMES) for model in listed)
    for name in NAMES:
        assert (await named.get(f"/v1/models/{name}")).json()["id"] == name
    assert (await named.get("/v1/models/fake")).json()["id"] == NAMES[0]  # the file's name still works
    missing = await named.get("/v1/models/other")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")
    assert all(name in str(error_of(missing)["message"]) for name in NAMES)


@pytest.mark.parametrize("name", [*NAMES, "fake", "fake.gguf"])
async def test_answers_have_the_first_name(named: httpx.AsyncClient, name: str) -> None:
    response = await named.post(CHAT, json=asking(model=name))
    assert (response.status_code, response.json()["model"]) == (200, NAMES[0])
    streamed = await named.post(CHAT, json=asking(model=name, stream=True))
    assert f'"model":"{NAMES[0]}"' in streamed.text
    response = await named.post("/v1/embeddings", json={"model": name, "input": "x"})
    assert response.json()["model"] == NAMES[0]


async def test_a_strict_server_answers_to_no_other_name(named: httpx.AsyncClient) -> None:
    assert (await named.post(CHAT, json=asking(model="gpt-5"))).status_code == 404


async def test_props_show_the_name_and_the_file(named: httpx.AsyncClient) -> None:
    said = (await named.get("/props")).json()
    assert (said["model_alias"], said["model_path"]) == (NAMES[0], "fake.gguf")


def test_several_models_have_names_of_their_own() -> None:
    settings = Settings.resolve(environ={}, aliases="a,b", models=["x"])
    assert settings.aliases == ("a", "b")
    with pytest.raises(OptionError, match="--alias names a single model: it does not go with --models"):
        serve_forever(settings, {}, False)


def test_a_vision_tower_belongs_to_one_model() -> None:
    with pytest.raises(OptionError, match="put each model's mmproj file beside it"):
        shelf_of(Settings.resolve(environ={}, mmproj="mmproj.gguf", models=["x"]))


# --- sampling


async def test_a_seed_of_the_server(engine: FakeEngine) -> None:
    async with app_client(engine, sampling={"seed": 42}) as http:
        await http.post(CHAT, json=asking())
        await http.post(CHAT, json=asking(seed=7))
        await http.post(CHAT, json=asking(seed=-1))
        assert [request.params.seed for request in engine.requests] == [42, 7, None]
        assert (await http.get("/props")).json()["default_generation_settings"]["params"]["seed"] == 42


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 5),
        ({"max_tokens": None}, 5),
        ({"max_tokens": 9}, 9),  # as in llama-server: a default, and no upper limit
        ({"max_completion_tokens": 3}, 3),
        ({"n_predict": -1}, 5),
    ],
)
async def test_a_limit_of_the_server(engine: FakeEngine, fields: dict[str, object], limit: int) -> None:
    async with app_client(engine, sampling={"max_tokens": 5}) as http:
        for path, prompt in (
            (CHAT, {"messages": [{"role": "user", "content": "forever"}]}),
            ("/v1/completions", {"prompt": "forever"}),
        ):
            response = await http.post(path, json={**prompt, **fields})
            assert response.json()["usage"]["completion_tokens"] == limit
        params = (await http.get("/props")).json()["default_generation_settings"]["params"]
        assert (params["max_tokens"], params["n_predict"]) == (5, 5)


async def test_a_limit_for_responses(engine: FakeEngine) -> None:
    async with app_client(engine, sampling={"max_tokens": 5}) as http:
        for fields, limit in (({}, 5), ({"max_output_tokens": 3}, 3)):
            response = await http.post("/v1/responses", json={"input": "forever", **fields})
            assert response.json()["usage"]["output_tokens"] == limit


async def test_without_a_limit(engine: FakeEngine) -> None:
    async with app_client(engine) as http:
        await http.post(CHAT, json=asking())
        await http.post("/v1/completions", json={"prompt": "forever"})
        assert [request.params.max_tokens for request in engine.requests] == [None, 16]
        params = (await http.get("/props")).json()["default_generation_settings"]["params"]
        assert (params["seed"], params["n_predict"]) == (None, -1)


def test_seed_and_limit_come_from_the_environment() -> None:
    settings = Settings.resolve(environ={"HETRUN_SEED": "42", "HETRUN_MAX_TOKENS": "5"})
    assert usual_sampling(settings, {"top_k": 3}) == {"seed": 42, "max_tokens": 5, "top_k": 3}
    settings = Settings.resolve(environ={"HETRUN_SEED": "-1", "HETRUN_MAX_TOKENS": "-1"})
    assert usual_sampling(settings, {}) == {}
    with pytest.raises(OptionError, match=r"max_tokens \(--max-tokens\) must be an integer of 1 or more"):
        usual_sampling(Settings.resolve(environ={}, max_tokens=0), {})


def test_kubernetes_variable_that_looks_like_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HETRUN_PORT", "8081")
    remark_on_kubernetes()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("HETRUN_PORT", "tcp://10.0.0.1:8080")
    remark_on_kubernetes()
    said = "HETRUN_PORT=tcp://10.0.0.1:8080 is ignored: Kubernetes has set it for a service called hetrun"
    assert said in capsys.readouterr().err
