"""Anthropic's API: what its libraries make of answers, and the shape of errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.client.events import GenerateRequest
from hetrun.server.anthropic.messages import BILLING
from hetrun.server.app import create_app
from tests.server.test_openapi import validator
from tests.server.test_tools import BOTH, CALL
from tests.support.fakes import FakeEngine

URL = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA},
    {"name": "now", "input_schema": {"type": "object"}},
]


def asking(content: object = "say hello world", **more: object) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": content}]} | more


@pytest.fixture
async def api(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    engine.info = replace(engine.info, thought_mark="<think>")
    app = create_app(LocalClient(engine), strict=True)
    headers = {"anthropic-version": "2023-06-01"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        yield client


async def message(api: httpx.AsyncClient, **body: object) -> dict[str, Any]:
    response = await api.post(URL, json=asking(**body))
    assert response.status_code == 200, response.text
    validator("AnthropicMessage").validate(response.json())
    found: dict[str, Any] = response.json()
    return found


async def events(api: httpx.AsyncClient, **body: object) -> list[dict[str, Any]]:
    response = await api.post(URL, json=asking(stream=True, **body))
    assert response.status_code == 200, response.text
    found = []
    for text in response.text.strip().split("\n\n"):
        kind, _, data = text.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def joined(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream, put together as the libraries do."""
    blocks: list[dict[str, Any]] = []
    for event in found:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"] | {"input_json": ""})
            case "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                for delta_name, name in (
                    ("text", "text"),
                    ("thinking", "thinking"),
                    ("signature", "signature"),
                    ("partial_json", "input_json"),
                ):
                    if delta_name in delta:
                        block[name] += delta[delta_name]
    for block in blocks:
        text = block.pop("input_json")
        if text:
            block["input"] = json.loads(text)
        block.pop("id", None)
    return blocks


def asked(engine: FakeEngine) -> GenerateRequest:
    return engine.requests[-1]


async def test_a_message(api: httpx.AsyncClient) -> None:
    found = await message(api)
    assert found["content"] == [{"type": "text", "text": "hello world"}]
    assert (found["role"], found["stop_reason"], found["stop_sequence"]) == ("assistant", "end_turn", None)
    assert found["id"].startswith("msg_")
    usage = found["usage"]
    assert usage["output_tokens"] == 2
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 0


async def test_a_stream_has_the_events_of_anthropic_in_order(api: httpx.AsyncClient) -> None:
    found = await events(api)
    kinds = [event["type"] for event in found if event["type"] != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert joined(found) == [{"type": "text", "text": "hello world"}]
    start, end = found[0]["message"], found[-2]
    validator("AnthropicMessage").validate(start)
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 2


async def test_the_length_limit_ends_it(api: httpx.AsyncClient) -> None:
    assert (await message(api, max_tokens=1))["stop_reason"] == "max_tokens"


async def test_calls_are_blocks_after_the_text(api: httpx.AsyncClient) -> None:
    found = await message(api, content=f"say {BOTH}", tools=TOOLS)
    calls = found["content"][1:]
    assert found["stop_reason"] == "tool_use"
    assert found["content"][0]["type"] == "text"
    assert found["content"][0]["text"].startswith("Let me look.")
    assert [(c["name"], c["input"]) for c in calls] == [("weather", {"city": "Oslo"}), ("now", {})]
    assert all(c["id"].startswith("toolu_") for c in calls)
    assert calls[0]["id"] != calls[1]["id"]
    streamed = joined(await events(api, content=f"say {BOTH}", tools=TOOLS))
    assert streamed == [{k: v for k, v in block.items() if k != "id"} for block in found["content"]]


async def test_one_call_where_parallel_ones_are_off(api: httpx.AsyncClient) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    found = await message(api, content=f"say {BOTH}", tools=TOOLS, tool_choice=choice)
    assert [block["type"] for block in found["content"]].count("tool_use") == 1


async def test_reasoning_is_a_block_before_the_text(api: httpx.AsyncClient) -> None:
    said = "say <think>Hm, so.</think>\n\nYes."
    found = await message(api, content=said, thinking={"type": "enabled", "budget_tokens": 1024})
    thought, text = found["content"]
    assert (thought["type"], thought["thinking"], text) == (
        "thinking",
        "Hm, so.",
        {"type": "text", "text": "Yes."},
    )
    streamed = joined(await events(api, content=said, thinking={"type": "adaptive"}))
    assert streamed == [thought, text]


async def test_reasoning_without_its_text(api: httpx.AsyncClient) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    found = await message(api, content="say <think>Hm, so.</think>\n\nYes.", thinking=thinking)
    assert [block.get("thinking", block.get("text")) for block in found["content"]] == ["", "Yes."]


@pytest.mark.parametrize(
    ("thinking", "expected"), [(None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True)]
)
async def test_the_template_thinks_only_where_that_is_asked_for(
    api: httpx.AsyncClient, engine: FakeEngine, thinking: object, expected: bool
) -> None:
    await message(api, thinking=thinking)
    assert asked(engine).template_options["enable_thinking"] is expected


async def test_a_conversation_with_calls_becomes_the_messages_of_templates(
    api: httpx.AsyncClient, engine: FakeEngine
) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such city", "is_error": True}
    thought = {"type": "thinking", "thinking": "Which?", "signature": "x"}
    said = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Let me look."}, call]},
        {"role": "user", "content": [result, failed, {"type": "text", "text": "say so"}]},
    ]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    await message(api, messages=said, system=system, tools=TOOLS)
    arguments = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert asked(engine).messages == (
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [{"type": "function", "id": "toolu_1", "function": arguments}],
            "reasoning_content": "Which?",
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no such city"},
        {"role": "user", "content": "say so"},
    )
    assert [tool["function"]["name"] for tool in asked(engine).tools] == ["weather", "now"]  # type: ignore[index]


@pytest.mark.parametrize("keep", [False, True])
async def test_the_billing_header_is_left_out_unless_it_is_wanted(engine: FakeEngine, keep: bool) -> None:
    app = create_app(LocalClient(engine), keep_billing_header=keep)
    system = [{"type": "text", "text": f"{BILLING}: cch=1f2e"}, {"type": "text", "text": "Be brief."}]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.post(URL, json=asking(system=system))).status_code == 200
    said = asked(engine).messages
    assert said is not None
    assert str(said[0]["content"]).startswith(BILLING) is keep


async def test_tokens_are_counted_without_an_answer(api: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {name: value for name, value in asking(system="Be brief.").items() if name != "max_tokens"}
    response = await api.post(f"{URL}/count_tokens", json=body)
    assert response.status_code == 200
    assert response.json().keys() == {"input_tokens"}
    assert response.json()["input_tokens"] > 5
    assert not engine.requests


async def test_a_schema_goes_to_the_engine(api: httpx.AsyncClient, engine: FakeEngine) -> None:
    await message(api, output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "max"})
    request = asked(engine)
    assert json.loads(str(request.params.json_schema)) == SCHEMA
    assert request.template_options["reasoning_effort"] == "high"


async def test_stop_sequences_and_sampling_go_to_the_engine(
    api: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await message(api, stop_sequences=["a", "b", "c", "d", "e"], temperature=0.5, top_k=3, top_p=0.9)
    params = asked(engine).params
    assert params.stop == ("a", "b", "c", "d", "e")
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 3, 0.9, 50)


async def test_its_libraries_list_the_models(api: httpx.AsyncClient) -> None:
    found = (await api.get("/v1/models")).json()
    model = found["data"][0]
    assert (model["type"], model["display_name"], found["has_more"]) == ("model", "fake", False)
    assert model["created_at"].endswith("Z")
    assert found["first_id"] == found["last_id"] == "fake"


async def test_claude_looks_whether_anyone_is_there(api: httpx.AsyncClient) -> None:
    assert (await api.head("/")).status_code == 200


PLACE = "messages[0]"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens must be 1 or more"),
    ({"max_tokens": "ten"}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"messages": None}, "messages is missing"),
    ({"messages": "hi"}, "messages must be a list"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [3]}, f"{PLACE} must be an object"),
    ({"messages": [{"content": "a"}]}, f"{PLACE}.role is missing"),
    ({"messages": [{"role": "tool", "content": "a"}]}, f"{PLACE}.role must be one of"),
    ({"messages": [{"role": "user"}]}, f"{PLACE}.content is missing"),
    ({"messages": [{"role": "user", "content": 3}]}, f"{PLACE}.content must be"),
    ({"messages": [{"role": "user", "content": []}]}, f"{PLACE}.content is empty"),
    ({"messages": [{"role": "user", "content": [3]}]}, f"{PLACE}.content[0] must be an object"),
    ({"messages": [{"role": "user", "content": [{}]}]}, f"{PLACE}.content[0].type is missing"),
    ({"content": [{"type": "image", "source": {}}]}, "takes no images"),
    ({"content": [{"type": "document", "source": {"type": "base64"}}]}, "takes no documents"),
    ({"content": [{"type": "video"}]}, "type must be text or tool_result"),
    ({"content": [{"type": "text"}]}, "content[0].text is missing"),
    ({"content": [{"type": "tool_result", "content": "x"}]}, "tool_use_id is missing"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "y"}]}]},
        "input must be an object",
    ),
    ({"system": 3}, "system must be"),
    ({"system": [{"type": "image"}]}, "takes no images"),
    ({"tools": {}}, "tools must be a list"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing"),
    ({"tools": [{"input_schema": SCHEMA}]}, "tools[0].name"),
    ({"tools": [{"name": "a", "input_schema": {"type": 123}}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": TOOLS, "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nobody"}}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice must be an object"),
    ({"thinking": {"type": "much"}}, "thinking.type"),
    ({"output_config": {"effort": "some"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
    ({"stop_sequences": "a"}, "stop_sequences must be a list"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": [3]}, "stop_sequences"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"stream": "yes"}, "stream must be"),
    ({"metadata": 3}, "metadata must be an object"),
    ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
    ({"colour": "red"}, "colour"),
]


@pytest.mark.parametrize(
    ("fields", "words"), WRONG, ids=[f"{i}-{words}" for i, (_, words) in enumerate(WRONG)]
)
async def test_what_is_wrong_is_named(api: httpx.AsyncClient, fields: dict[str, Any], words: str) -> None:
    response = await api.post(URL, json=asking(**fields))
    assert words in said(response, 400, "invalid_request_error")


def said(response: httpx.Response, status: int, kind: str) -> str:
    """The text of an error."""
    assert response.status_code == status, response.text
    validator("AnthropicError").validate(response.json())
    error = response.json()["error"]
    assert error["type"] == kind
    return str(error["message"])


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b"3"])
async def test_a_body_that_is_no_object(api: httpx.AsyncClient, body: bytes) -> None:
    assert said(await api.post(URL, content=body), 400, "invalid_request_error")


async def test_other_errors_have_their_statuses_and_shape(api: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert "does not exist" in said(await api.post(URL, json=asking(model="other")), 404, "not_found_error")
    assert "not allowed" in said(await api.get(URL), 405, "invalid_request_error")
    assert said(await api.post(URL, json=asking("fail")), 500, "api_error")
    assert said(await api.post(f"{URL}/batches", json={}), 501, "api_error")
    app = create_app(LocalClient(engine), api_key="secret")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert said(await client.post(URL, json=asking()), 401, "authentication_error")
        assert (await client.post(URL, json=asking(), headers={"x-api-key": "secret"})).status_code == 200


async def test_an_error_in_the_middle_is_an_event(api: httpx.AsyncClient) -> None:
    found = await events(api, content="fail")
    assert found[0]["type"] == "message_start"
    validator("AnthropicError").validate(found[-1])
    assert found[-1]["error"]["type"] == "api_error"


async def test_a_call_that_was_cut_off_has_no_arguments(api: httpx.AsyncClient) -> None:
    n = len(f"{CALL}".split(" ")) - 2
    found = await message(api, content=f"say {CALL}", tools=TOOLS, max_tokens=n)
    assert found["stop_reason"] == "max_tokens"
    assert all(block["input"] == {} for block in found["content"] if block["type"] == "tool_use")
