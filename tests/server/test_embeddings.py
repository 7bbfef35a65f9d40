"""POST /v1/embeddings: what comes back, and how everything wrong is refused."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.client.events import Event, GenerateRequest
from hetrun.errors import Overloaded
from hetrun.server.app import create_app
from hetrun.server.routes import embeddings
from tests.support.fakes import INFO, FakeEngine

PATH = "/v1/embeddings"


def expected(text: str, dimensions: int = 4) -> list[float]:
    vector = np.array([len(text), ord(text[0]), ord(text[-1]), 1][:dimensions], np.float64)
    return [float(x) for x in vector / np.linalg.norm(vector)]


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.fixture
async def sdk(engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(create_app(LocalClient(engine), strict=True))
    http = cast("Any", httpx.AsyncClient(transport=transport))
    async with openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="any", http_client=http, max_retries=0
    ) as client:
        yield client


# --- answers


async def test_one_text(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    for path in (PATH, "/embeddings"):
        response = await http.post(path, json={"input": "say some words", "model": "fake"})
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        answer = response.json()
        (one,) = answer.pop("data")
        assert answer == {
            "object": "list",
            "model": "fake",
            "usage": {"prompt_tokens": 7, "total_tokens": 7},
        }
        assert (one["object"], one["index"]) == ("embedding", 0)
        assert one["embedding"] == pytest.approx(expected("say some words"), abs=1e-7)
    request = engine.requests[0]
    assert (request.text, request.pooling, request.whole) == ("say some words", "mean", True)


async def test_many_texts_and_tokens_in_their_order(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    texts = [f"say {'word ' * (i % 5)}{i}" for i in range(200)]
    answer = (await http.post(PATH, json={"input": texts})).json()
    assert [one["index"] for one in answer["data"]] == list(range(200))
    for one, text in zip(answer["data"], texts, strict=True):
        assert one["embedding"] == pytest.approx(expected(text), abs=1e-7)
    assert answer["usage"]["total_tokens"] == 200 * 7
    tokens = [list(text.encode()) for text in texts]
    assert (await http.post(PATH, json={"input": tokens})).json() == answer
    assert engine.requests[-1].tokens is not None
    one = (await http.post(PATH, json={"input": tokens[7]})).json()["data"]
    assert [o["embedding"] for o in one] == [answer["data"][7]["embedding"]]


async def test_base64_is_the_same_numbers_and_fewer_of_them_have_length_1(http: httpx.AsyncClient) -> None:
    for dimensions in (1, 3, 4):
        asking = {"input": "say hello", "dimensions": dimensions}
        floats = (await http.post(PATH, json=asking)).json()["data"][0]["embedding"]
        packed = (await http.post(PATH, json=asking | {"encoding_format": "base64"})).json()["data"][0]
        numbers = struct.unpack(f"<{dimensions}f", base64.b64decode(packed["embedding"]))
        assert [np.float32(x) for x in floats] == [np.float32(x) for x in numbers]
        assert floats == pytest.approx(expected("say hello", dimensions), abs=1e-7)
        assert np.linalg.norm(floats) == pytest.approx(1, abs=1e-6)


async def test_a_vector_of_zeros_stays_one(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    def submit(request: GenerateRequest, on_event: Any) -> int:  # noqa: ANN401
        on_event(Event("done", embedding=bytes(16)))
        return 1

    engine.submit = submit  # type: ignore[method-assign]
    answer = (await http.post(PATH, json={"input": "say hello"})).json()
    assert answer["data"][0]["embedding"] == [0, 0, 0, 0]


async def test_the_official_client(sdk: openai.AsyncOpenAI) -> None:
    """It asks for base64 by itself, and gives floats."""
    answer = await sdk.embeddings.create(model="fake", input=["say a", "say bb"], user="someone")
    assert [one.embedding for one in answer.data] == [
        pytest.approx(expected(text), abs=1e-7) for text in ("say a", "say bb")
    ]
    assert answer.usage.total_tokens == 14
    plain = await sdk.embeddings.create(model="fake", input="say a", encoding_format="float", dimensions=2)
    assert plain.data[0].embedding == pytest.approx(expected("say a", 2), abs=1e-7)
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.embeddings.create(model="fake", input="refuse")
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
    assert "maximum context length is 2048 tokens" in str(refused.value)
    with pytest.raises(openai.NotFoundError):
        await sdk.embeddings.create(model="other", input="say a")


# --- what is refused

BAD: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, "input", "missing_required_parameter"),
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": 5}, "input", "invalid_type"),
    ({"input": {"text": "a"}}, "input", "invalid_type"),
    ({"input": ""}, "input", "invalid_value"),
    ({"input": []}, "input", "empty_array"),
    ({"input": [[]]}, "input[0]", "empty_array"),
    ({"input": ["a", ""]}, "input[1]", "invalid_value"),
    ({"input": ["a", 5]}, "input[1]", "invalid_type"),
    ({"input": ["a", None]}, "input[1]", "invalid_type"),
    ({"input": [True]}, "input[0]", "invalid_type"),
    ({"input": [5, "a"]}, "input[1]", "invalid_value"),
    ({"input": [5, 1.0]}, "input[1]", "invalid_value"),
    ({"input": [1.5]}, "input[0]", "invalid_value"),
    ({"input": [0, True]}, "input[1]", "invalid_value"),
    ({"input": [-1]}, "input[0]", "invalid_value"),
    ({"input": [[1, 2], [3, 256]]}, "input[1][1]", "invalid_value"),
    ({"input": [1] * (INFO.context + 1)}, "input", "context_length_exceeded"),
    ({"input": ["a"] * 2049}, "input", "array_above_max_length"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
    ({"input": "a", "encoding_format": 5}, "encoding_format", "invalid_value"),
    ({"input": "a", "encoding_format": []}, "encoding_format", "invalid_value"),
    ({"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
    ({"input": "a", "dimensions": 5}, "dimensions", "invalid_value"),
    ({"input": "a", "dimensions": True}, "dimensions", "invalid_value"),
    ({"input": "a", "dimensions": "2"}, "dimensions", "invalid_value"),
    ({"input": "a", "user": 5}, "user", "invalid_type"),
    ({"input": "a", "model": 5}, "model", "invalid_type"),
    ({"input": "a", "priority": "high"}, "priority", "invalid_type"),
    ({"input": "a", "deadline_s": -1}, "deadline_s", "invalid_value"),
]


@pytest.mark.parametrize(("body", "param", "code"), BAD)
async def test_what_is_wrong(
    http: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], param: str, code: str
) -> None:
    response = await http.post(PATH, json=body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert not engine.requests, "nothing is begun for a request that is wrong"


async def test_unknown_fields_and_models_are_refused_where_it_is_strict(
    http: httpx.AsyncClient, strict: httpx.AsyncClient
) -> None:
    odd = {"input": "say a", "model": "fake", "inputs": "a"}
    assert (await http.post(PATH, json=odd)).status_code == 200
    error = error_of(await strict.post(PATH, json=odd))
    assert (error["param"], error["code"]) == ("inputs", "unknown_parameter")
    assert "did you mean input?" in error["message"]
    assert (await strict.post(PATH, json={"input": "say a", "model": "other"})).status_code == 404
    assert (await http.get(PATH)).status_code == 405


async def test_a_model_that_gives_none(engine: FakeEngine, http: httpx.AsyncClient) -> None:
    engine.info = type(INFO)(**{**{f: getattr(INFO, f) for f in INFO.__slots__}, "width": 0})
    response = await http.post(PATH, json={"input": "a"})
    assert response.status_code == 400
    assert "Embeddings are not available" in error_of(response)["message"]


# --- among others


async def test_only_a_few_texts_are_in_the_engine_at_a_time(
    engine: FakeEngine, http: httpx.AsyncClient
) -> None:
    asked = asyncio.create_task(http.post(PATH, json={"input": ["silence"] * 100}))
    while len(engine.requests) < embeddings.TOGETHER:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert len(engine.requests) == embeddings.TOGETHER
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert await asyncio.to_thread(engine.idle.wait, 10)
    assert sorted(engine.cancelled) == list(range(1, embeddings.TOGETHER + 1))


async def test_the_first_error_ends_the_others(engine: FakeEngine, http: httpx.AsyncClient) -> None:
    response = await http.post(PATH, json={"input": ["silence", "fail", *["silence"] * 100]})
    assert response.status_code == 500
    assert error_of(response)["message"] == "the fake backend failed"
    assert response.headers["x-should-retry"] == "false"
    assert await asyncio.to_thread(engine.idle.wait, 10)
    assert len(engine.requests) <= embeddings.TOGETHER + 1


async def test_a_full_queue_takes_fewer_at_a_time(engine: FakeEngine, http: httpx.AsyncClient) -> None:
    """What was computed before is not lost for it."""
    engine.refusals += [Overloaded("the queue is full", 3.0)] * 20
    answer = await http.post(PATH, json={"input": [f"say {i}" for i in range(50)]})
    assert answer.status_code == 200
    assert [one["embedding"][0] > 0 for one in answer.json()["data"]] == [True] * 50
    engine.refusals += [Overloaded("the queue is full", 3.0)] * 40
    refused = await http.post(PATH, json={"input": [f"say {i}" for i in range(50)]})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")


async def test_a_deadline_passes_though_the_engine_says_nothing(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "LATE_S", 0.05)
    response = await http.post(PATH, json={"input": ["silence", "say a"], "deadline_s": 0.05})
    assert response.status_code == 504
    assert error_of(response)["code"] == "deadline_exceeded"


async def test_a_deadline_is_that_of_the_whole_request(engine: FakeEngine, http: httpx.AsyncClient) -> None:
    await http.post(PATH, json={"input": [f"say {'a ' * 30}"] * 40, "deadline_s": 50})
    left = [request.deadline_s or 0 for request in engine.requests]
    assert left[0] > left[-1] > 40
