"""The endpoints, called in process: what comes back, and how everything wrong is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from hetrun.client.engine_client import LocalClient, WorkerClient
from hetrun.client.events import Event, Timings, Usage
from hetrun.config import Settings
from hetrun.server import body
from hetrun.server.app import create_app
from hetrun.server.usage import UsageSum
from tests.support.fakes import ENDLESS, REFUSED, FakeEngine

CHAT = "/v1/chat/completions"


def asking(text: str = "say hello world", **more: object) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **more}


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


# --- answers


async def test_a_whole_answer(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await http.post(CHAT, json=asking())
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "fake"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert answer["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert engine.requests[0].messages == ({"role": "user", "content": "say hello world"},)
    assert engine.requests[0].params.temperature == 1.0


async def test_a_streamed_answer(http: httpx.AsyncClient) -> None:
    chunks = chunks_of(await http.post(CHAT, json=asking(stream=True)))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in chunks[0]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "hello "}, {"content": "world"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


async def test_usage_comes_last_when_it_is_asked_for(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True}
    *chunks, last = chunks_of(await http.post(CHAT, json=asking(stream=True, stream_options=options)))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 9


async def test_a_full_answer_ends_with_length(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json=asking("forever", max_tokens=3))
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["choices"][0]["message"]["content"] == "ha ha ha "


async def test_texts_that_look_like_json_are_streamed_as_they_are(http: httpx.AsyncClient) -> None:
    text = '{"content":""} \\ "content":"" \N{EM DASH} \N{GRINNING FACE}'
    response = await http.post(CHAT, json=asking(f"say {text}", stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(response)]
    assert "".join(delta.get("content", "") for delta in deltas) == text


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(http: httpx.AsyncClient, stream: bool) -> None:
    response = await http.post(CHAT, json=asking(logprobs=True, top_logprobs=2, stream=stream))
    if stream:
        entries = [
            e
            for c in chunks_of(response)
            for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
    else:
        entries = response.json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == 2
    assert entries[0] == {
        "token": "hello ",
        "logprob": -0.5,
        "bytes": list(b"hello "),
        "top_logprobs": [
            {"token": "A", "logprob": -1.0, "bytes": [65]},
            {"token": "\ufffd", "logprob": -2.0, "bytes": [0xC3]},
        ],
    }


async def test_messages_in_parts_and_new_roles(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "say a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": None},
        {"role": "user", "content": parts, "name": "ann"},
    ]
    assert (await http.post(CHAT, json={"messages": messages})).status_code == 200
    assert engine.requests[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "say a\nb", "name": "ann"},
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_timings_as_llama_cpp_has_them(http: httpx.AsyncClient, stream: bool) -> None:
    response = await http.post(CHAT, json=asking(stream=stream))
    answer = chunks_of(response)[-1] if stream else response.json()
    assert answer["timings"] == {
        "cache_n": 3,
        "prompt_n": 4,
        "prompt_ms": 5.0,
        "prompt_per_token_ms": 1.25,
        "prompt_per_second": 800.0,
        "predicted_n": 2,
        "predicted_ms": pytest.approx(1000 / 150),
        "predicted_per_token_ms": pytest.approx(500 / 150),
        "predicted_per_second": pytest.approx(300),
    }


def test_timings_of_several_choices() -> None:
    counts = UsageSum(2)
    slow = Timings(prompt_tok_s=10.0, decode_tok_s=2.0, drafted=4, accepted=3)
    counts.record(1, Event("done", usage=Usage(20, 5, 20), timings=slow))
    counts.record(0, Event("done", usage=Usage(20, 3), timings=Timings(prompt_tok_s=100.0, decode_tok_s=4.0)))
    found = counts.timings()
    assert (found["cache_n"], found["prompt_n"], found["prompt_ms"]) == (0, 20, 200.0)
    assert (found["predicted_n"], found["predicted_ms"], found["predicted_per_second"]) == (8, 2000.0, 4.0)
    assert (found["draft_n"], found["draft_n_accepted"]) == (4, 3)
    nothing = UsageSum(1)
    nothing.record(0, Event("done"))
    assert set(nothing.timings().values()) == {0}


# --- refusals

LONELY = '{"messages": [{"role": "user", "content": "\\ud800"}]}'


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[1, 2]", "must be a JSON object"),
        ("3", "must be a JSON object"),
        ('{"temperature": NaN}', "NaN is not JSON"),
        ('{"seed": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        (b"\xff\xfe{}", "not valid"),
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (LONELY, "not valid UTF-8"),
    ],
)
async def test_a_body_that_is_no_request(http: httpx.AsyncClient, raw: str | bytes, said: str) -> None:
    response = await http.post(CHAT, content=raw)
    assert response.status_code == 400
    assert said in error_of(response)["message"]


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_large(
    http: httpx.AsyncClient, announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "MAX_BYTES", 1000)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 400

    content = b" " * 1001 if announced else pieces()
    response = await http.post(CHAT, content=content)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"


BAD_FIELDS: list[tuple[dict[str, object], str, str]] = [
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "boss", "content": "hi"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]", "invalid_type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url.url",
        "missing_required_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "invalid_type",
    ),
    ({"messages": [{"role": "user", "content": "", "name": 3}]}, "messages[0].name", "invalid_type"),
    ({"messages": [{"role": "function", "content": "4"}]}, "messages[0]", "unsupported_parameter"),
    ({"model": 3}, "model", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": "ten"}, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": -5}, "max_completion_tokens", "invalid_value"),
    ({"max_tokens": True}, "max_tokens", "invalid_value"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_value"),
    ({"top_p": 2}, "top_p", "invalid_value"),
    ({"min_p": -0.1}, "min_p", "invalid_value"),
    ({"top_k": 1.5}, "top_k", "invalid_value"),
    ({"seed": "x"}, "seed", "invalid_value"),
    ({"stop": 5}, "stop", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logprobs": 3}, "logprobs", "invalid_type"),
    ({"logprobs": True, "top_logprobs": 50}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": 3}, "stream_options", "invalid_type"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "invalid_type",
    ),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"n": "1"}, "n", "invalid_value"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    ({"priority": 1.5}, "priority", "invalid_type"),
    ({"priority": True}, "priority", "invalid_type"),
    ({"priority": 2**31}, "priority", "invalid_value"),
    ({"deadline_s": 0}, "deadline_s", "invalid_value"),
    ({"deadline_s": 1e300}, "deadline_s", "invalid_value"),
    ({"deadline_s": "soon"}, "deadline_s", "invalid_type"),
    ({"deadline_s": True}, "deadline_s", "invalid_type"),
    ({"user": 3}, "user", "invalid_type"),
    ({"safety_identifier": ["me"]}, "safety_identifier", "invalid_type"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_FIELDS, ids=lambda x: str(x)[:50])
async def test_a_wrong_field_is_named(
    http: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, object], param: str, code: str
) -> None:
    response = await http.post(CHAT, json=asking() | fields)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert engine.requests == []


async def test_unknown_fields_are_ignored_unless_strict(
    http: httpx.AsyncClient, strict: httpx.AsyncClient
) -> None:
    body = asking(temprature=3)
    assert (await http.post(CHAT, json=body)).status_code == 200
    response = await strict.post(CHAT, json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == "temprature"
    assert "did you mean temperature?" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "gpt-4"}, 404),
        ({"model": "fake.gguf"}, 200),
        ({"model": "Fake by Nemo v2"}, 200),
        ({"temperature": 3}, 400),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400),
        ({"user": "me", "store": False, "metadata": {}}, 200),
        ({"priority": -1, "deadline_s": 2.5, "safety_identifier": "me"}, 200),
    ],
)
async def test_openai_limits_hold_when_strict(
    http: httpx.AsyncClient, strict: httpx.AsyncClient, fields: dict[str, object], status: int
) -> None:
    assert (await http.post(CHAT, json=asking() | fields)).status_code == 200
    assert (await strict.post(CHAT, json=asking() | fields)).status_code == status


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long(http: httpx.AsyncClient, stream: bool) -> None:
    response = await http.post(CHAT, json=asking("refuse", stream=stream))
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    limit = "This model's maximum context length is 2048 tokens. "
    assert error["message"].startswith(f"{limit}The prompt is too long: ")


async def test_a_failure_has_a_status_while_it_still_can(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json=asking("fail"))
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert error_of(response)["message"] == "the fake backend failed"


async def test_a_failure_in_the_middle_is_the_last_event(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json=asking("fail", stream=True))
    *_, last, rest = response.text.split("\n\n")
    assert rest == ""
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the fake backend failed"


# --- the other endpoints, and around them


async def test_models(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("fake", "model", "hetrun")
    assert model["meta"]["n_ctx"] == 2048
    assert (await http.get("/v1/models/fake")).json() == model
    missing = await http.get("/v1/models/some/other")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("PUT", CHAT, 405)])
async def test_wrong_routes_have_the_same_error_bodies(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await http.request(method, path)
    assert response.status_code == status
    assert path in error_of(response)["message"]
    assert response.headers.get("allow") == ("POST" if status == 405 else None)


async def test_health(http: httpx.AsyncClient) -> None:
    response = await http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_health_while_loading_and_after_a_failure() -> None:
    client = WorkerClient(Settings.resolve(model=ENDLESS), engine="tests.support.fakes:FakeEngine")
    transport = httpx.ASGITransport(create_app(client))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        response = await http.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "loading")
    await client.close()
    dead = WorkerClient(Settings.resolve(model=REFUSED), engine="tests.support.fakes:FakeEngine")
    transport = httpx.ASGITransport(create_app(dead))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        response = await http.post(CHAT, json=asking())
        assert "it is not a model" in error_of(response)["message"]
        response = await http.get("/health")
        assert response.status_code == 503
    await dead.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic secret"}, 401),
        ({"Authorization": "Bearer secret"}, 200),
        ({"authorization": "bearer secret"}, 200),
        ({"X-Api-Key": "secret"}, 200),
    ],
)
async def test_the_api_key(engine: FakeEngine, headers: dict[str, str], status: int) -> None:
    transport = httpx.ASGITransport(create_app(LocalClient(engine), api_key="secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        response = await http.get("/v1/models", headers=headers)
        assert response.status_code == status
        if status == 401:
            assert error_of(response)["code"] == "invalid_api_key"
            # By these words litellm, and others, know what is wrong.
            assert error_of(response)["message"].startswith("Incorrect API key provided")
            assert (await http.post(CHAT, json=asking(), headers=headers)).status_code == 401
        assert (await http.get("/health")).status_code == 200
