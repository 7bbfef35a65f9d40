"""Anthropic's API: what each event looks like, what messages become, what is refused and how."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from hetrun.api.local_model import LocalModel
from hetrun.client.engine_client import LocalClient
from hetrun.errors import Overloaded
from hetrun.server import body as bodies
from hetrun.server.anthropic.signature import OMITTED, thought_of
from hetrun.server.app import create_app
from tests.models.tiny import TinyLlama, write_gguf
from tests.support.fakes import FakeEngine

URL = "/v1/messages"
CONTEXT = 1024
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch={};"


def asking(content: object = "say hi", **more: object) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 100, "messages": [{"role": "user", "content": content}]} | more


def client_of(engine: FakeEngine, **options: Any) -> httpx.AsyncClient:  # noqa: ANN401 - of create_app
    transport = httpx.ASGITransport(create_app(LocalClient(engine), **options))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def events_of(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of a stream."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


async def said(http: httpx.AsyncClient, **more: object) -> dict[str, Any]:
    response = await http.post(URL, json=asking(**more))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(response: httpx.Response, status: int, kind: str, words: str = "") -> None:
    assert response.status_code == status, response.text
    answer = response.json()
    assert set(answer) == {"type", "error"}
    assert answer["type"] == "error"
    assert set(answer["error"]) == {"type", "message"}
    assert answer["error"]["type"] == kind
    assert words in answer["error"]["message"]


async def test_a_whole_message(http: httpx.AsyncClient) -> None:
    response = await http.post(URL, json=asking("say It is so."))
    answer = response.json()
    assert response.headers["request-id"].startswith("req_")
    assert answer.pop("id").startswith("msg_")
    assert answer.pop("timings")["cache_n"] == 3
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "It is so."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 3,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


async def test_every_event_of_a_stream(engine: FakeEngine) -> None:
    engine.info = replace(engine.info, thought_mark="<think>")
    async with client_of(engine) as http:
        asked = asking(f"say <think>Hm so</think>Let me look.\n{CALL}", stream=True, tools=[WEATHER])
        events = events_of(await http.post(URL, json=asked))
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    blocks = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use"]
    begun = next(data for name, data in events if name == "content_block_start" and data["index"] == 2)
    assert begun["content_block"].pop("id").startswith("toolu_")
    assert begun["content_block"] == {"type": "tool_use", "name": "weather", "input": {}}
    deltas: list[dict[str, Any]] = [d for name, d in events if name == "content_block_delta"]
    text = {
        (d["index"], d["delta"]["type"]): "".join(
            str(e["delta"][list(e["delta"])[1]])
            for e in deltas
            if (e["index"], e["delta"]["type"]) == (d["index"], d["delta"]["type"])
        )
        for d in deltas
    }
    assert text.pop((0, "signature_delta"))
    assert text == {
        (0, "thinking_delta"): "Hm so",
        (1, "text_delta"): "Let me look.",
        (2, "input_json_delta"): '{"city": "Oslo"}',
    }
    stops = [data["index"] for name, data in events if name == "content_block_stop"]
    assert stops == [0, 1, 2]
    last = events[-2][1]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["cache_read_input_tokens"] == 3
    assert 0 < last["usage"]["output_tokens_details"]["thinking_tokens"] < last["usage"]["output_tokens"]


async def test_an_error_in_a_stream_is_its_last_event(http: httpx.AsyncClient) -> None:
    events = events_of(await http.post(URL, json=asking("fail", stream=True)))
    assert events[-1] == (
        "error",
        {"type": "error", "error": {"type": "api_error", "message": "the fake backend failed"}},
    )


async def test_why_an_answer_ended(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await said(http, content="forever ha", max_tokens=3))["stop_reason"] == "max_tokens"
    answer = await said(http, content=f"say {CALL}", tools=[WEATHER])
    assert (answer["stop_reason"], answer["content"][0]["input"]) == ("tool_use", {"city": "Oslo"})
    cut = await said(http, content=f"say {CALL}", tools=[WEATHER], max_tokens=4)
    assert (cut["stop_reason"], cut["content"][0]["input"]) == ("max_tokens", {})
    assert engine.requests[0].params.max_tokens == 3


async def test_messages_become_those_of_the_template(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    thinking = {"type": "thinking", "thinking": "It says so.", "signature": "x"}
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "I look."}, use]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "no net", "is_error": True},
                {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "fine"}]},
                {"type": "tool_result", "tool_use_id": "c"},
                {"type": "text", "text": "say so"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Help.", "cache_control": {"type": "ephemeral"}}]
    await said(http, messages=messages, system=system, tools=[WEATHER])
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert engine.requests[0].messages == (
        {"role": "system", "content": "Help."},
        {"role": "user", "content": "one\ntwo\n<system>\nBe brief.\n</system>"},
        {
            "role": "assistant",
            "reasoning_content": "It says so.",
            "content": "I look.",
            "tool_calls": [{"type": "function", "id": "a", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "Error: no net"},
        {"role": "tool", "tool_call_id": "b", "content": "fine"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "say so"},
    )
    described = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
    assert engine.requests[0].tools == ({"type": "function", "function": described},)


@pytest.mark.parametrize("keeps", [False, True])
async def test_the_billing_line_is_left_out(engine: FakeEngine, keeps: bool) -> None:
    async with client_of(engine, keep_billing_header=keeps) as http:
        line = BILLING.format(1)
        blocks = [{"type": "text", "text": line}, {"type": "text", "text": "Help."}]
        for system in (blocks, f"{line}\nHelp."):
            await said(http, system=system)
    for request in engine.requests:
        assert request.messages is not None
        assert request.messages[0]["content"] == (f"{line}\nHelp." if keeps else "Help.")


@pytest.mark.parametrize(
    ("thinking", "on"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 2000}, True),
    ],
)
async def test_thinking_is_on_where_it_is_asked_for(
    http: httpx.AsyncClient, engine: FakeEngine, thinking: object, on: bool
) -> None:
    await said(http, thinking=thinking, output_config={"effort": "max"})
    options = engine.requests[0].template_options
    assert (options["enable_thinking"], options["reasoning_effort"]) == (on, "high")


async def test_thoughts_that_are_omitted_come_back_with_their_signature(engine: FakeEngine) -> None:
    engine.info = replace(engine.info, thought_mark="<think>")
    thinking = {"type": "adaptive", "display": "omitted"}
    async with client_of(engine) as http:
        answer = await said(http, content="say <think>Hm so</think>Yes", thinking=thinking)
        block = answer["content"][0]
        assert (block["type"], block["thinking"]) == ("thinking", "")
        assert (thought_of(block["signature"]), thought_of("x"), thought_of(f"{OMITTED}?")) == (
            "Hm so",
            "",
            "",
        )
        turns = [*asking()["messages"], {"role": "assistant", "content": answer["content"]}]
        await said(http, messages=[*turns, {"role": "user", "content": "say more"}])
    assert engine.requests[1].messages is not None
    assert engine.requests[1].messages[1] == {
        "role": "assistant",
        "reasoning_content": "Hm so",
        "content": "Yes",
    }


async def test_choices_of_tools(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    await said(http, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    await said(http, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"})
    await said(http, tools=[WEATHER], tool_choice={"type": "none"})
    one, named, none = engine.requests
    assert one.parts is not None
    assert named.parts is not None
    assert "Oslo" not in named.parts
    assert '"city"' in named.parts
    assert (none.tools, none.parts) == ((), None)


async def test_an_answer_by_a_schema(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    await said(http, output_config={"format": form})
    await said(http, output_format=form)
    for request in engine.requests:
        assert json.loads(str(request.params.json_schema)) == SCHEMA


async def test_sampling_is_passed_on(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    await said(http, temperature=0.5, top_k=3, top_p=0.7, stop_sequences=["x", "y"], seed=4)
    params = engine.requests[0].params
    assert (params.temperature, params.top_k, params.top_p, params.stop, params.seed) == (
        *(0.5, 3, 0.7, ("x", "y")),
        4,
    )


ROWS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "ten"}, "max_tokens"),
    ({"max_tokens": 1e12}, "max_tokens"),
    ({"max_tokens": 0, "stream": True}, "max_tokens"),
    ({"messages": None}, "messages is missing"),
    ({"messages": "hi"}, "messages must be a list"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "system", "content": "hi"}]}, "messages is empty"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role is missing"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role must be"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    (asking(3), "messages[0].content must be"),
    (asking([3]), "messages[0].content[0]"),
    (asking([{"type": "text"}]), "messages[0].content[0].text is missing"),
    (asking([{"type": "hologram"}]), "messages[0].content[0].type must be text, image or tool_result"),
    (asking([{"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}]), "reads no files"),
    (asking([{"type": "document", "source": {}}]), "no documents"),
    (
        asking([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}]),
        "source must be an object",
    ),
    (asking([{"type": "tool_result", "tool_use_id": "a", "is_error": 1}]), "is_error must be"),
    (asking([{"type": "tool_result"}]), "tool_use_id is missing"),
    ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "runs no tools"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "input is missing"),
    ({"system": 3}, "system must be"),
    ({"system": [{"type": "image"}]}, "system[0].type is image"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": "x"}, "top_k"),
    ({"stop_sequences": 5}, "stop_sequences must be"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop": "x"}, "use stop_sequences"),
    ({"response_format": {"type": "json_object"}}, "use output_config.format"),
    ({"stream": "yes"}, "stream must be"),
    ({"tools": {}}, "tools must be a list"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
    ({"tools": [{"name": "f", "input_schema": {"type": 123}}]}, "tools[0].input_schema.type"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "no tools of its own"),
    ({"tools": [WEATHER, WEATHER]}, "another tool named weather"),
    ({"tools": [WEATHER], "tool_choice": {"type": "maybe"}}, "tool_choice.type must be"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "none of the tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    ({"tools": [WEATHER], "tool_choice": "auto"}, "tool_choice must be an object"),
    ({"tool_choice": {"type": "any"}}, "needs tools"),
    ({"thinking": {"type": "often"}}, "thinking.type must be"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort must be"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
    ({"metadata": 3}, "metadata must be an object"),
    ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
    (asking("refuse"), "prompt is too long"),
]


@pytest.mark.parametrize(("fields", "words"), ROWS, ids=lambda x: str(x)[:60])
async def test_a_mistake_is_named(
    http: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], words: str
) -> None:
    refused(await http.post(URL, json=asking() | fields), 400, "invalid_request_error", words)
    assert engine.requests == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b'{"a":' * 5000])
async def test_bodies_that_are_no_objects(http: httpx.AsyncClient, content: bytes) -> None:
    for path in (URL, f"{URL}/count_tokens"):
        refused(await http.post(path, content=content), 400, "invalid_request_error", "body")


async def test_every_refusal_has_the_shape(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_of(engine, api_key="secret", hosts=("test",), most_requests=1) as http:
        refused(await http.post(URL, json=asking()), 401, "authentication_error")
        for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
            assert (await http.post(URL, json=asking(), headers=headers)).status_code == 200
        http.headers["x-api-key"] = "secret"
        foreign = {"Origin": "http://elsewhere.example"}
        refused(await http.post(URL, json=asking(), headers=foreign), 403, "permission_error")
        refused(await http.get(URL), 405, "invalid_request_error")
        refused(await http.get(f"{URL}/nowhere"), 404, "not_found_error")
        refused(await http.get(f"{URL}/batches"), 501, "api_error")
        refused(await http.post(URL, json=asking("odd")), 500, "api_error")
        engine.refusals = [Overloaded("full", 2.0), Overloaded("never", None)]
        busy = await http.post(URL, json=asking())
        refused(busy, 529, "overloaded_error", "full")
        assert busy.headers["retry-after"] == "2"
        refused(await http.post(URL, json=asking()), 429, "rate_limit_error", "never")
        running = asyncio.create_task(http.post(URL, json=asking("silence")))
        while not engine.requests or engine.requests[-1].messages[-1]["content"] != "silence":  # type: ignore[index]
            await asyncio.sleep(0)
        refused(await http.post(URL, json=asking()), 529, "overloaded_error", "in progress")
        running.cancel()
        monkeypatch.setattr(bodies, "MAX_BYTES", 100)
        await asyncio.gather(running, return_exceptions=True)
        refused(await http.post(URL, json=asking("x" * 200)), 413, "request_too_large")


async def test_a_strict_server_knows_what_claude_code_sends(strict: httpx.AsyncClient) -> None:
    usual = asking(
        "say hi",
        metadata={"user_id": '{"session_id":"x"}'},
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
    )
    assert (await strict.post(f"{URL}?beta=true", json=usual)).status_code == 200
    newer = usual | {"telepathy": True}
    refused(await strict.post(URL, json=newer), 400, "invalid_request_error", "telepathy: Extra inputs")
    beta = {"anthropic-beta": "telepathy-2027-01-01"}
    assert (await strict.post(URL, json=newer, headers=beta)).status_code == 200
    refused(await strict.post(URL, json=usual | {"temperature": 1.5}), 400, "invalid_request_error")
    refused(await strict.post(URL, json=usual | {"model": "another"}), 404, "not_found_error")
    low = {"type": "enabled", "budget_tokens": 5}
    refused(await strict.post(URL, json=usual | {"thinking": low}), 400, "invalid_request_error")


async def test_models_for_each_api(http: httpx.AsyncClient) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = (await http.get("/v1/models", headers=headers)).json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "fake", "fake")
    (model,) = listed["data"]
    assert (model["type"], model["display_name"], model["max_input_tokens"]) == ("model", "fake", 2048)
    assert (await http.get("/v1/models/fake", headers=headers)).json() == model
    assert "type" not in (await http.get("/v1/models/fake")).json()


async def test_a_look_at_the_root(http: httpx.AsyncClient) -> None:
    response = await http.head("/")
    assert (response.status_code, response.content) == (200, b"")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalModel]:
    path = tmp_path_factory.mktemp("anthropic") / "tiny.gguf"
    model = TinyLlama("tiny", layers=1, embd=64, ffn=64, heads=2, kv_heads=2)
    with LocalModel(write_gguf(model, path), backends=["reference"], ctx=CONTEXT) as opened:
        yield opened


@pytest.fixture
async def real(llm: LocalModel) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(LocalClient(llm)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_counted_tokens_are_those_of_the_prompt(real: httpx.AsyncClient) -> None:
    asked = asking("count these words", max_tokens=2, system="Help.", tools=[WEATHER])
    used = (await real.post(URL, json=asked)).json()["usage"]
    del asked["max_tokens"]
    counted = (await real.post(f"{URL}/count_tokens", json=asked)).json()
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}


async def test_a_stop_sequence_is_named(real: httpx.AsyncClient) -> None:
    first = (await real.post(URL, json=asking("go on", max_tokens=12, temperature=0))).json()
    stop = first["content"][0]["text"][2:5]
    asked = asking("go on", max_tokens=12, temperature=0, stop_sequences=["never that", stop])
    answer = (await real.post(URL, json=asked)).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert stop not in answer["content"][0]["text"]


async def test_no_tokens_warm_the_cache_and_a_full_context_is_said(real: httpx.AsyncClient) -> None:
    async def count(words: int) -> int:
        answer = await real.post(f"{URL}/count_tokens", json=asking("warm " * words))
        return int(answer.json()["input_tokens"])

    least = await count(10)
    words = 10 + (CONTEXT - 20 - least) // (await count(11) - least)
    warm = (await real.post(URL, json=asking("warm " * words, max_tokens=0))).json()
    assert (warm["content"], warm["stop_reason"], warm["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    full = (await real.post(URL, json=asking("warm " * words, max_tokens=100_000, ignore_eos=True))).json()
    assert full["stop_reason"] == "model_context_window_exceeded"
    assert full["usage"]["cache_read_input_tokens"] >= warm["usage"]["input_tokens"] - 1


async def test_a_title_between_two_turns_leaves_the_conversation_cached(real: httpx.AsyncClient) -> None:
    system = "You are an agent that helps with files. " * 6

    def turn(number: int, *turns: object, **more: object) -> dict[str, Any]:
        blocks = [{"type": "text", "text": BILLING.format(number)}, {"type": "text", "text": system}]
        return asking(
            max_tokens=4, system=blocks, messages=[{"role": "user", "content": "one"}, *turns], **more
        )

    first = (await real.post(URL, json=turn(1))).json()
    title = asking("Write a title for: one", max_tokens=4, system="You write titles.")
    assert (await real.post(URL, json=title)).status_code == 200
    back = {"role": "assistant", "content": first["content"]}
    events = events_of(
        await real.post(URL, json=turn(2, back, {"role": "user", "content": "2"}, stream=True))
    )
    used = events[-2][1]["usage"]
    assert used["cache_read_input_tokens"] >= 0.95 * (first["usage"]["input_tokens"] - 1)
    begun = events[0][1]["message"]["usage"]
    assert begun["cache_read_input_tokens"] == used["cache_read_input_tokens"]
    assert begun["input_tokens"] == used["input_tokens"]
