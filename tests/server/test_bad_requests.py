"""Everything wrong that other servers answer wrongly: statuses, fields at fault and codes as OpenAI has them.

Schemas that cannot be followed stand in test_sampling, for they need a vocabulary; floods in test_crowd.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from hetrun.client.engine_client import LocalClient, WorkerClient
from hetrun.config import Settings
from hetrun.server import body
from hetrun.server.app import create_app
from hetrun.server.listen import ListenAddress
from tests.server.test_api import CHAT, asking, error_of
from tests.server.test_listen import served
from tests.support.fakes import REFUSED, FakeEngine

TEXT = "/v1/completions"
NESTED = "messages[0].content[0].type"
URL = "messages[0].content[0].image_url.url"
Row = tuple[str, dict[str, Any], str, str]


def part(kind: str, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": [{"type": kind, **more}]}]}


def tool(**more: object) -> list[dict[str, object]]:
    return [{"type": "function", **more}]


ROWS: list[Row] = [
    (CHAT, {"messages": None}, "messages", "missing_required_parameter"),
    (CHAT, {"messages": "hi"}, "messages", "invalid_type"),
    (CHAT, {"messages": []}, "messages", "empty_array"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_type"),
    (CHAT, part("hologram"), NESTED, "invalid_value"),
    (CHAT, part("image_url", image_url={"url": "file:///etc/passwd"}), URL, "invalid_image_url"),
    (CHAT, part("image_url", image_url={"url": "data:image/png;base64,"}), URL, "invalid_image"),
    (CHAT, part("input_audio", input_audio={"data": "", "format": "wav"}), NESTED, "invalid_value"),
    (CHAT, part("file", file={"file_id": "x"}), NESTED, "invalid_value"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": "ten"}, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": -5}, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 1e12}, "max_tokens", "invalid_value"),
    (CHAT, {"n": 0}, "n", "invalid_value"),
    (CHAT, {"n": 129}, "n", "invalid_value"),
    (CHAT, {"stop": 5}, "stop", "invalid_value"),
    (CHAT, {"stop": ""}, "stop", "invalid_value"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"256": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": [[5, 1]]}, "logit_bias", "invalid_value"),
    (CHAT, {"logprobs": True, "top_logprobs": 50}, "top_logprobs", "invalid_value"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "invalid_value"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    (CHAT, {"seed": "x"}, "seed", "invalid_value"),
    (CHAT, {"stream": "yes"}, "stream", "invalid_type"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    (
        CHAT,
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "missing_required_parameter",
    ),
    (CHAT, {"tools": {}}, "tools", "invalid_type"),
    (CHAT, {"tools": tool()}, "tools[0].function", "missing_required_parameter"),
    (
        CHAT,
        {"tools": tool(function={"name": "f", "parameters": {"type": 123}})},
        "tools[0].function.parameters",
        "invalid_function_parameters",
    ),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function", "missing_required_parameter"),
    (CHAT, {"tool_choice": "maybe"}, "tool_choice", "invalid_value"),
    (
        CHAT,
        {
            "tools": tool(function={"name": "f"}),
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "tool_choice",
        "invalid_value",
    ),
    (CHAT, asking("refuse"), "messages", "context_length_exceeded"),
    (CHAT, {"lora": [{"id": 99, "scale": 1.0}]}, "lora", "unsupported_parameter"),
    (TEXT, {"prompt": None}, "prompt", "missing_required_parameter"),
    (TEXT, {"prompt": [65, 256]}, "prompt[1]", "invalid_value"),
    (TEXT, {"prompt": [65, -1]}, "prompt[1]", "invalid_value"),
    (TEXT, {"prompt": "refuse"}, "prompt", "context_length_exceeded"),
    (TEXT, {"suffix": "end"}, "suffix", "not_supported"),
    (TEXT, {"best_of": 3, "n": 2, "stream": True}, "best_of", "invalid_value"),
]
# OpenAI's own limits, which a server for models of many makers keeps only when it is told to.
STRICT_ROWS: list[Row] = [
    (CHAT, {"temperature": 5}, "temperature", "decimal_above_max_value"),
    (CHAT, {"stop": list("abcdefghij")}, "stop", "array_above_max_length"),
    (CHAT, {"seed": 2**63}, "seed", "integer_above_max_value"),
    (CHAT, {"temprature": 1}, "temprature", "unknown_parameter"),
    (TEXT, {"temperature": 5}, "temperature", "decimal_above_max_value"),
    (TEXT, {"messages": []}, "messages", "unknown_parameter"),
]
# The same status either way, and OpenAI's code where the server is strict.
NUMBERS: list[Row] = [
    (CHAT, {"temperature": -1}, "temperature", "decimal_below_min_value"),
    (CHAT, {"top_p": 2}, "top_p", "decimal_above_max_value"),
    (TEXT, {"top_p": -1}, "top_p", "decimal_below_min_value"),
]


def sent(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return (asking("say hi") if path == CHAT else {"model": "fake", "prompt": "say hi"}) | fields


def refused(response: httpx.Response, param: str | None, code: str | None, status: int = 400) -> None:
    assert response.status_code == status, response.text
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(("path", "fields", "param", "code"), ROWS, ids=lambda x: str(x)[:60])
async def test_a_mistake_is_named(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any], param: str, code: str
) -> None:
    refused(await http.post(path, json=sent(path, fields)), param, code)
    assert engine.requests == []


@pytest.mark.parametrize(("path", "fields", "param", "code"), STRICT_ROWS, ids=lambda x: str(x)[:60])
async def test_openai_s_limits_hold_when_strict(
    http: httpx.AsyncClient,
    strict: httpx.AsyncClient,
    path: str,
    fields: dict[str, Any],
    param: str,
    code: str,
) -> None:
    refused(await strict.post(path, json=sent(path, fields)), param, code)
    assert (await http.post(path, json=sent(path, fields))).status_code == 200


@pytest.mark.parametrize(("path", "fields", "param", "code"), NUMBERS, ids=lambda x: str(x)[:60])
async def test_numbers_out_of_range(
    http: httpx.AsyncClient,
    strict: httpx.AsyncClient,
    path: str,
    fields: dict[str, Any],
    param: str,
    code: str,
) -> None:
    refused(await http.post(path, json=sent(path, fields)), param, "invalid_value")
    refused(await strict.post(path, json=sent(path, fields)), param, code)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"3", b'{"a": "\xc3('])
async def test_no_json_object(http: httpx.AsyncClient, path: str, content: bytes) -> None:
    response = await http.post(path, content=content)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"
    assert error_of(response)["code"] in ("invalid_json", "invalid_type")


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_model(http: httpx.AsyncClient, strict: httpx.AsyncClient, path: str) -> None:
    missing = sent(path, {})
    del missing["model"]
    for client in (http, strict):  # the one that is loaded is meant
        answer = await client.post(path, json=missing)
        assert (answer.status_code, answer.json()["model"]) == (200, "fake")
    refused(await strict.post(path, json=sent(path, {"model": "gpt-4"})), "model", "model_not_found", 404)
    assert (await strict.get("/v1/models/fake")).status_code == 200
    refused(await strict.get("/v1/models/gpt-4"), "model", "model_not_found", 404)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        *((method, path, {"POST"}) for path in (CHAT, TEXT, "/completions") for method in ("GET", "PUT")),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", "/v1/models/fake", {"GET", "HEAD"}),
    ],
)
async def test_another_method(http: httpx.AsyncClient, method: str, path: str, allowed: set[str]) -> None:
    response = await http.request(method, path)
    refused(response, None, None, 405)
    assert set(response.headers["allow"].split(", ")) == allowed


async def test_an_unknown_route(http: httpx.AsyncClient) -> None:
    refused(await http.get("/v1/nowhere"), None, None, 404)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_fields_that_change_nothing_here_are_taken(strict: httpx.AsyncClient, path: str) -> None:
    known: dict[str, Any] = {"id_slot": 99, "cache_prompt": True, "n_keep": 4, "timings_per_token": True}
    known |= {"reasoning_effort": "low", "store": True, "metadata": {}, "service_tier": "auto", "n_probs": 0}
    known |= {"lora": [], "tools": None, "user": "me", "verbosity": "low", "parallel_tool_calls": False}
    assert (await strict.post(path, json=sent(path, known))).status_code == 200


async def test_a_body_of_any_size(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_BYTES", 100)
    response = await http.post(TEXT, json={"prompt": "a" * 100})
    refused(response, None, "request_too_large", 413)
    assert "x-should-retry" not in response.headers  # a client asks no one again for it anyway


async def test_half_a_body(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MOST_S", 0.01)

    async def silent() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await asyncio.Event().wait()

    refused(await http.post(TEXT, content=silent()), None, "request_timeout", 408)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_no_key_or_a_wrong_one(engine: FakeEngine, headers: dict[str, str], path: str) -> None:
    transport = httpx.ASGITransport(create_app(LocalClient(engine), api_key="secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
        refused(await http.post(path, json=sent(path, {})), None, "invalid_api_key", 401)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000,
        b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n" % CHAT.encode(),
        b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n" % CHAT.encode(),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
    ids=["header", "chunks", "length", "garbage"],
)
async def test_what_is_no_http(engine: FakeEngine, raw: bytes) -> None:
    async with served(engine, ListenAddress(port=0)) as http:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(raw)
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert (await http.get("/health")).status_code == 200
    assert engine.requests == []


# --- what clients ask again


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("order", "status"), [("fail", 500), ("stop", 503)])
async def test_what_would_fail_again_is_not_asked_again(
    http: httpx.AsyncClient, path: str, order: str, status: int
) -> None:
    response = await http.post(path, json={"prompt": order, "messages": asking(order)["messages"]})
    assert response.status_code == status
    assert error_of(response)["type"] == "server_error"
    assert response.headers["x-should-retry"] == "false"


async def test_a_model_that_cannot_be_had_is_no_mistake_of_who_asks() -> None:
    client = WorkerClient(Settings.resolve(model=REFUSED), engine="tests.support.fakes:FakeEngine")
    transport = httpx.ASGITransport(create_app(client))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for response in (await http.post(TEXT, json={"prompt": "hi"}), await http.get("/v1/models")):
            assert response.status_code == 503
            assert (error_of(response)["code"], error_of(response)["type"]) == (
                "engine_stopped",
                "server_error",
            )
            assert "it is not a model" in error_of(response)["message"]
            assert response.headers["x-should-retry"] == "false"
    await client.close()
