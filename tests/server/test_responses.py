"""/v1/responses, called in process: shapes, the order of a stream's events, refusals, and what is kept."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.errors import OptionError
from hetrun.server.app import create_app
from hetrun.server.listen import ListenAddress
from hetrun.server.responses.routes import OWN
from hetrun.server.responses.store import OF_A_TURN, OVERHEAD, Archive, StoredResponse, turn
from tests.server.test_api import error_of
from tests.server.test_listen import served
from tests.support.fakes import FakeEngine

RESPONSES = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"x": 1}}\n</tool_call>'


def asking(said: object = "say hello world", /, **more: object) -> dict[str, Any]:
    return {"model": "fake", "input": said, **more}


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


# --- answers


async def test_a_whole_response(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await http.post(
        RESPONSES, json=asking(instructions="Be brief.", metadata={"a": "b"}, user="me")
    )
    assert response.status_code == 200
    answer = response.json()
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "fake")
    (item,) = answer["output"]
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    part = {"type": "output_text", "annotations": [], "text": "hello world", "logprobs": []}
    assert item["content"] == [part]
    assert answer["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 9,
    }
    assert (answer["instructions"], answer["metadata"], answer["user"]) == ("Be brief.", {"a": "b"}, "me")
    assert (answer["temperature"], answer["tool_choice"], answer["tools"]) == (1.0, "auto", [])
    assert (answer["error"], answer["incomplete_details"], answer["store"]) == (None, None, True)
    assert answer["completed_at"] >= answer["created_at"]
    assert answer["timings"]["predicted_n"] == 2
    assert engine.requests[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "say hello world"},
    )


async def test_a_streamed_response(http: httpx.AsyncClient) -> None:
    events = events_of(await http.post(RESPONSES, json=asking(stream=True)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    created, *_, last = (event["response"] for event in events if "response" in event)
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert last["id"] == created["id"]
    assert (last["status"], last["usage"]["total_tokens"]) == ("completed", 9)
    assert [event["delta"] for event in events[4:6]] == ["hello ", "world"]
    assert events[2]["item"] == last["output"][0] | {"status": "in_progress", "content": []}
    assert events[6]["text"] == events[7]["part"]["text"] == "hello world"
    assert events[8]["item"] == last["output"][0]
    assert {event["item_id"] for event in events[3:8]} == {last["output"][0]["id"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_answer_is_incomplete(http: httpx.AsyncClient, stream: bool) -> None:
    response = await http.post(RESPONSES, json=asking("forever", max_output_tokens=3, stream=stream))
    if stream:
        last = events_of(response)[-1]
        assert last["type"] == "response.incomplete"
    answer = last["response"] if stream else response.json()
    assert (answer["status"], answer["completed_at"]) == ("incomplete", None)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["max_output_tokens"] == 3
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["output"][0]["content"][0]["text"] == "ha ha ha "


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(http: httpx.AsyncClient, stream: bool) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": stream}
    response = await http.post(RESPONSES, json=asking(**fields))
    if stream:
        events = events_of(response)
        answer = events[-1]["response"]
        deltas = [e for event in events if event["type"].endswith(".delta") for e in event["logprobs"]]
        (done,) = (event for event in events if event["type"].endswith("text.done"))
        assert deltas == done["logprobs"] == answer["output"][0]["content"][0]["logprobs"]
    else:
        answer = response.json()
    entries = answer["output"][0]["content"][0]["logprobs"]
    assert len(entries) == 2
    assert (entries[0]["token"], entries[0]["logprob"], entries[0]["bytes"]) == (
        "hello ",
        -0.5,
        list(b"hello "),
    )
    assert [top["token"] for top in entries[0]["top_logprobs"]] == ["A", "\ufffd"]


async def test_items_roles_and_parts(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "Hello", "annotations": []},
                {"type": "refusal", "refusal": "there"},
            ],
        },
        {"role": "user", "content": "say hello"},
    ]
    assert (await http.post(RESPONSES, json=asking(items, instructions="Be brief."))).status_code == 200
    assert engine.requests[0].messages == (
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello\nthere", "reasoning_content": "Hm"},
        {"role": "user", "content": "say hello"},
    )


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}, SCHEMA),
    ],
)
async def test_the_form_of_an_answer(
    http: httpx.AsyncClient, engine: FakeEngine, form: dict[str, object], schema: object
) -> None:
    answer = (await http.post(RESPONSES, json=asking(text={"format": form}))).json()
    assert answer["text"] == {"format": form, "verbosity": "medium"}
    structure = engine.requests[0].params.structure
    assert (json.loads(structure.text) if structure else None) == schema


async def test_texts_that_look_like_json(http: httpx.AsyncClient) -> None:
    text = '{"output":[]} "logprobs":[] \\ \N{EM DASH} \N{GRINNING FACE} \n\nevent: error'
    body = asking(f"say {text}", stream=True, instructions='"output":[],"content":[]')
    answer = events_of(await http.post(RESPONSES, json=body))[-1]["response"]
    assert answer["output"][0]["content"][0]["text"] == text


# --- calls and thoughts


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_thoughts_are_items(
    http: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.info = replace(engine.info, thought_mark="<think>")
    said = f"muse Hm, so </think> Let me look.\n{CALL}\n{CALL}"
    response = await http.post(RESPONSES, json=asking(said, tools=[WEATHER], stream=stream))
    answer = events_of(response)[-1]["response"] if stream else response.json()
    thought, message, first, second = answer["output"]
    assert (thought["type"], thought["status"], thought["summary"]) == ("reasoning", "completed", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, so"}]
    assert message["content"][0]["text"] == "Let me look."
    assert (first["type"], first["name"], first["arguments"]) == ("function_call", "weather", '{"x": 1}')
    assert first["call_id"] != second["call_id"]
    assert answer["status"] == "completed"
    assert 0 < answer["usage"]["output_tokens_details"]["reasoning_tokens"] < answer["usage"]["output_tokens"]
    assert answer["tools"] == [WEATHER]
    (told,) = engine.requests[0].tools
    assert told == {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    if stream:
        events = events_of(response)
        added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
        assert [item["id"] for item in added] == [item["id"] for item in answer["output"]]
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == answer["output"]
        for i, kind in enumerate(("reasoning_text", "output_text", *["function_call_arguments"] * 2)):
            mine = [e for e in events if e.get("output_index") == i and kind in e["type"]]
            *deltas, last = mine
            assert "".join(e["delta"] for e in deltas) == last.get("text", last.get("arguments"))


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_in_channels_are_items(
    http: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.info = replace(engine.info, tool_format="harmony", thought_mark="<|channel|>analysis<|message|>")
    next_one = "<|end|><|start|>assistant"
    thoughts = [f"<|channel|>analysis<|message|>{text}{next_one}" for text in ("Hm, so", "And so")]
    look = f"<|channel|>commentary<|message|>Let me look.{next_one}"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"x": 1}'
    said = f"say {thoughts[0]}{look}{thoughts[1]}{call}"
    response = await http.post(RESPONSES, json=asking(said, tools=[WEATHER], stream=stream))
    answer = events_of(response)[-1]["response"] if stream else response.json()
    first, message, second, called = answer["output"]
    assert [item["content"][0]["text"] for item in (first, second)] == ["Hm, so", "And so"]
    assert message["content"][0]["text"] == "Let me look."
    assert (called["name"], called["arguments"]) == ("weather", '{"x": 1}')
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "say so"}
    await http.post(RESPONSES, json=asking([result], tools=[WEATHER], previous_response_id=answer["id"]))
    sent = engine.requests[-1].messages
    assert sent is not None
    assert sent[1]["reasoning_content"] == "Hm, so\n\nAnd so"
    assert sent[1]["content"] == "Let me look."


@pytest.mark.parametrize("stream", [False, True])
async def test_gemmas_thoughts_and_calls_are_items(
    http: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.info = replace(engine.info, tool_format="gemma4", thought_mark="<|channel>thought")
    thoughts = [f"<|channel>thought\n{text}\n<channel|>" for text in ("Hm, so", "And so")]
    call = '<|tool_call>call:weather{x:[<|"|>a<|"|>]}<tool_call|>'
    said = f"say {thoughts[0]}Let me look.\n{thoughts[1]}{call}"
    response = await http.post(RESPONSES, json=asking(said, tools=[WEATHER], stream=stream))
    answer = events_of(response)[-1]["response"] if stream else response.json()
    first, message, second, called = answer["output"]
    assert [item["content"][0]["text"] for item in (first, second)] == ["Hm, so", "And so"]
    assert message["content"][0]["text"] == "Let me look."
    assert (called["name"], called["arguments"]) == ("weather", '{"x": ["a"]}')


async def test_a_conversation_with_calls_goes_on(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}
    first = (await http.post(RESPONSES, json=asking(f"say Well.\n{CALL}\n{CALL}", **fields))).json()
    assert first["tool_choice"] == fields["tool_choice"]
    items = [item for item in first["output"] if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"say {i}"}
        for i, item in enumerate(items)
    ]
    kept = await http.post(RESPONSES, json=asking(results, previous_response_id=first["id"]))
    sent = await http.post(
        RESPONSES, json=asking([{"role": "user", "content": "hi"}, *first["output"], *results])
    )
    assert kept.json()["output"][0]["content"][0]["text"] == "1"
    assert sent.json()["output"][0]["content"][0]["text"] == "1"
    function = {"name": "weather", "arguments": '{"x": 1}'}
    calls = [{"type": "function", "id": item["call_id"], "function": function} for item in items]
    expected = (
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": items[0]["call_id"], "content": "say 0"},
        {"role": "tool", "tool_call_id": items[1]["call_id"], "content": "say 1"},
    )
    for request in engine.requests[1:]:
        assert request.messages is not None
        assert request.messages[1:] == expected


async def test_a_call_that_is_cut_off(http: httpx.AsyncClient) -> None:
    answer = (
        await http.post(RESPONSES, json=asking(f"say {CALL}", tools=[WEATHER], max_output_tokens=4))
    ).json()
    (call,) = answer["output"]
    assert (call["type"], call["status"], call["arguments"]) == ("function_call", "incomplete", '{"x": ')
    assert answer["status"] == "incomplete"


async def test_scores_are_of_text_only(http: httpx.AsyncClient) -> None:
    body = asking(f"say Well then.\n{CALL}", tools=[WEATHER], include=["message.output_text.logprobs"])
    message, _ = (await http.post(RESPONSES, json=body)).json()["output"]
    tokens = "".join(entry["token"] for entry in message["content"][0]["logprobs"])
    assert tokens.startswith("Well then.")
    assert "arguments" not in tokens


async def test_a_tool_that_cannot_be_forced(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.refusals = [OptionError("parts at anyOf[0].x: there is a mistake in it")]
    response = await http.post(RESPONSES, json=asking(tools=[WEATHER], tool_choice="required"))
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == ("tools[0].parameters", "invalid_function_parameters")
    assert error["message"] == "tools[0].parameters.x: there is a mistake in it"


# --- refusals

NESTED: dict[str, object] = {}
for _ in range(65):
    NESTED = {"a": NESTED}

BAD_FIELDS: list[tuple[dict[str, object], str, str]] = [
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": 3}, "input", "invalid_type"),
    ({"input": {}}, "input", "invalid_type"),
    ({"input": []}, "input", "empty_array"),
    ({"input": ["hi"]}, "input[0]", "invalid_type"),
    ({"input": [{"content": "hi"}]}, "input[0].role", "missing_required_parameter"),
    ({"input": [{"role": "tool", "content": "hi"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": ["user"], "content": "hi"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content", "invalid_type"),
    ({"input": [{"role": "user", "content": [3]}]}, "input[0].content[0]", "invalid_type"),
    ({"input": [{"role": "user", "content": [{}]}]}, "input[0].content[0].type", "invalid_value"),
    (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}
            ]
        },
        "input[0].content[0].image_url",
        "invalid_image_url",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "invalid_type",
    ),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", "invalid_value"),
    ({"input": [{"type": {}}]}, "input[0].type", "invalid_value"),
    ({"input": [{"type": "function_call"}]}, "input[0].name", "missing_required_parameter"),
    (
        {"input": [{"type": "function_call", "name": "f", "arguments": {}}]},
        "input[0].arguments",
        "invalid_type",
    ),
    (
        {"input": [{"type": "function_call", "name": "f", "arguments": "", "call_id": "x" * 257}]},
        "input[0].call_id",
        "string_above_max_length",
    ),
    (
        {"input": [{"type": "function_call_output", "output": "4"}]},
        "input[0].call_id",
        "missing_required_parameter",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "c"}]},
        "input[0].output",
        "missing_required_parameter",
    ),
    ({"input": [{"type": "reasoning", "content": 3}]}, "input[0].content", "invalid_type"),
    (
        {"input": [{"type": "reasoning", "content": [{"type": "text"}]}]},
        "input[0].content[0].type",
        "invalid_value",
    ),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_parameter"),
    ({"instructions": 3}, "instructions", "invalid_type"),
    ({"model": 3}, "model", "invalid_type"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": "ten"}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": 1e12}, "max_output_tokens", "invalid_value"),
    ({"max_tokens": 3}, "max_tokens", "unsupported_parameter"),
    ({"max_completion_tokens": 3}, "max_completion_tokens", "unsupported_parameter"),
    ({"messages": []}, "messages", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"top_p": 2}, "top_p", "invalid_value"),
    ({"top_p": []}, "top_p", "invalid_value"),
    ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": True}, "top_logprobs", "invalid_value"),
    ({"include": "x"}, "include", "invalid_type"),
    ({"include": [{}]}, "include[0]", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream": True, "stream_options": 3}, "stream_options", "invalid_type"),
    ({"store": "yes"}, "store", "invalid_type"),
    ({"text": "json"}, "text", "invalid_type"),
    ({"text": {"format": "json"}}, "text.format", "invalid_type"),
    ({"text": {"format": {}}}, "text.format.type", "missing_required_parameter"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    (
        {"text": {"format": {"type": "json_schema"}}},
        "text.format.schema",
        "missing_required_parameter",
    ),
    ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema", "invalid_type"),
    (
        {"text": {"format": {"type": "json_schema", "schema": {}, "strict": 1}}},
        "text.format.strict",
        "invalid_type",
    ),
    ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex", "invalid_value"),
    ({"text": {"verbosity": 3}}, "text.verbosity", "invalid_type"),
    ({"text": {"format": NESTED}}, "text.format", "invalid_value"),
    ({"reasoning": "high"}, "reasoning", "invalid_type"),
    ({"reasoning": {"effort": NESTED}}, "reasoning.effort", "invalid_type"),
    ({"tools": {}}, "tools", "invalid_type"),
    ({"tools": [3]}, "tools[0]", "invalid_type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name", "invalid_value"),
    ({"tools": [WEATHER | {"parameters": 3}]}, "tools[0].parameters", "invalid_type"),
    ({"tools": [WEATHER | {"parameters": NESTED}]}, "tools[0]", "invalid_value"),
    ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice", "invalid_value"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function"}},
        "tool_choice.name",
        "missing_required_parameter",
    ),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "invalid_value"),
    ({"tools": [WEATHER], "regex": "a"}, "regex", "invalid_value"),
    ({"metadata": 3}, "metadata", "invalid_type"),
    ({"metadata": {"a": 3}}, "metadata.a", "invalid_type"),
    ({"metadata": {"a": "b" * 513}}, "metadata.a", "string_above_max_length"),
    ({"metadata": {"a" * 65: "b"}}, f"metadata.{'a' * 64}", "string_above_max_length"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "object_above_max_properties"),
    ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"truncation": {}}, "truncation", "invalid_value"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "x"}}, "prompt", "unsupported_parameter"),
    ({"max_tool_calls": "x"}, "max_tool_calls", "invalid_value"),
    ({"parallel_tool_calls": 3}, "parallel_tool_calls", "invalid_type"),
    ({"prompt_cache_key": 3}, "prompt_cache_key", "invalid_type"),
    ({"user": 3}, "user", "invalid_type"),
    ({"safety_identifier": 3}, "safety_identifier", "invalid_type"),
    ({"previous_response_id": 3}, "previous_response_id", "invalid_type"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_FIELDS, ids=lambda x: str(x)[:50])
async def test_a_wrong_field_is_named(
    http: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, object], param: str, code: str
) -> None:
    response = await http.post(RESPONSES, json=asking() | fields)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert engine.requests == []


ODD: list[object] = [
    *(True, 0, -1, 1.5, 1e308, 10**30, "", "x", "function", [], [[]], {}, [None], [{}]),
    *({"type": "x"}, {"type": {}}, [{"type": "function"}], [{"role": "user", "content": [[]]}]),
    {"format": {"type": []}},
]


@pytest.mark.parametrize("name", [*OWN, "tools", "tool_choice", "store", "metadata", "stream", "user", "n"])
async def test_no_value_of_a_field_is_our_failure(http: httpx.AsyncClient, name: str) -> None:
    tool = {"type": "function", "name": "f"}
    call = {"type": "function_call", "name": "f", "arguments": "", "call_id": "c"}
    for odd in ODD:
        bodies: list[dict[str, Any]] = [
            {name: odd},
            {"input": [{"role": "user", "content": "hi", "type": "message", name: odd}]},
            {"input": [call | {name: odd}]},
            {"tools": [tool | {name: odd}]},
            {"text": {"format": {"type": "json_schema", "schema": {}, name: odd}}},
        ]
        for body in bodies:
            response = await http.post(RESPONSES, json=asking() | body)
            assert response.status_code in (200, 400), (body, response.text)


async def test_what_changes_nothing_is_accepted(http: httpx.AsyncClient, strict: httpx.AsyncClient) -> None:
    fields: dict[str, object] = {
        **{"background": False, "conversation": None, "truncation": "disabled", "service_tier": "auto"},
        **{"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "tools": []},
        **{"tool_choice": "auto", "parallel_tool_calls": False, "max_tool_calls": 3, "store": False},
        **{"prompt_cache_key": "k", "text": {"verbosity": "low"}, "stream_options": {}, "stream": True},
    }
    for client in (http, strict):
        answer = events_of(await client.post(RESPONSES, json=asking(**fields)))[-1]["response"]
        assert (answer["reasoning"]["effort"], answer["text"]["verbosity"]) == ("low", "low")
        assert (answer["parallel_tool_calls"], answer["store"]) == (False, False)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "gpt-4"}, 404),
        ({"temperature": 3}, 400),
        ({"temprature": 3}, 400),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, 400),  # it has no name
    ],
)
async def test_openai_limits_hold_when_strict(
    http: httpx.AsyncClient, strict: httpx.AsyncClient, fields: dict[str, object], status: int
) -> None:
    assert (await http.post(RESPONSES, json=asking() | fields)).status_code == 200
    assert (await strict.post(RESPONSES, json=asking() | fields)).status_code == status


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_before_the_first_token_has_a_status(
    http: httpx.AsyncClient, stream: bool
) -> None:
    response = await http.post(RESPONSES, json=asking("refuse", stream=stream))
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}
    response = await http.post(RESPONSES, json=asking("unfit json_schema", text=form, stream=stream))
    assert response.status_code == 400
    assert error_of(response)["param"] == "text.format"
    assert error_of(response)["message"] == "text.format: there is a mistake in it"


async def test_a_failure_has_a_status_while_it_still_can(http: httpx.AsyncClient) -> None:
    response = await http.post(RESPONSES, json=asking("fail"))
    assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
    assert error_of(response)["message"] == "the fake backend failed"


async def test_a_failure_in_the_middle_ends_the_response(http: httpx.AsyncClient) -> None:
    *_, error, failed = events_of(await http.post(RESPONSES, json=asking("fail", stream=True)))
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert (error["message"], error["code"]) == ("the fake backend failed", "internal_error")
    answer = failed["response"]
    assert answer["status"] == "failed"
    assert answer["error"] == {"code": "server_error", "message": "the fake backend failed"}
    # It is no answer that someone could go on from.
    assert (await http.get(f"{RESPONSES}/{answer['id']}")).status_code == 404


# --- leaving


async def test_leaving_cancels(engine: FakeEngine) -> None:
    async with served(engine, ListenAddress(port=0)) as http:
        async with http.stream("POST", RESPONSES, json=asking("forever", stream=True)) as response:
            async for line in response.aiter_lines():
                if "output_text.delta" in line:
                    break
        assert await asyncio.to_thread(engine.idle.wait, 5)
        assert engine.cancelled == [1]


async def test_leaving_before_a_whole_answer_cancels(engine: FakeEngine) -> None:
    async with served(engine, ListenAddress(port=0)) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(RESPONSES, json=asking("forever"), timeout=0.5)
        assert await asyncio.to_thread(engine.idle.wait, 5)
        assert engine.cancelled == [1]


# --- what is kept


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on(http: httpx.AsyncClient, engine: FakeEngine, stream: bool) -> None:
    async def ask(**fields: object) -> dict[str, Any]:
        response = await http.post(RESPONSES, json=asking(stream=stream, **fields))
        answer: dict[str, Any] = events_of(response)[-1]["response"] if stream else response.json()
        return answer

    first = await ask(text=None, instructions="Be brief.")
    second = await ask(previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    # Both may be gone on from, more than once.
    again = await ask(previous_response_id=first["id"], instructions="Be kind.")
    third = await http.post(RESPONSES, json={"previous_response_id": second["id"]})
    assert third.status_code == 200
    asked = {"role": "user", "content": "say hello world"}
    said = {"role": "assistant", "content": "hello world"}
    assert [request.messages for request in engine.requests] == [
        ({"role": "system", "content": "Be brief."}, asked),
        (asked, said, asked),  # instructions are those of one response only
        ({"role": "system", "content": "Be kind."}, asked, said, asked),
        (asked, said, asked, said),
    ]
    assert (await http.get(f"{RESPONSES}/{again['id']}")).json() == again
    assert (await http.get(f"/responses/{first['id']}")).json() == first


async def test_what_is_deleted_or_was_not_stored_is_gone(http: httpx.AsyncClient) -> None:
    first = (await http.post(RESPONSES, json=asking())).json()
    second = (await http.post(RESPONSES, json=asking(previous_response_id=first["id"]))).json()
    unstored = (await http.post(RESPONSES, json=asking(store=False))).json()
    gone = await http.delete(f"{RESPONSES}/{first['id']}")
    assert gone.json() == {"id": first["id"], "object": "response", "deleted": True}
    for name in (first["id"], unstored["id"], "resp_1"):
        for method in ("GET", "DELETE"):
            response = await http.request(method, f"{RESPONSES}/{name}")
            assert response.status_code == 404
            assert error_of(response)["code"] == "response_not_found"
        response = await http.post(RESPONSES, json=asking(previous_response_id=name))
        assert response.status_code == 400
        assert error_of(response)["code"] == "previous_response_not_found"
    # What went on from it holds all that it needs.
    third = await http.post(RESPONSES, json=asking(previous_response_id=second["id"]))
    assert third.status_code == 200


async def test_a_stored_response_is_not_streamed(http: httpx.AsyncClient) -> None:
    answer = (await http.post(RESPONSES, json=asking())).json()
    response = await http.get(f"{RESPONSES}/{answer['id']}", params={"stream": "true"})
    assert response.status_code == 400
    assert error_of(response)["param"] == "stream"


async def test_other_keys_find_nothing(http: httpx.AsyncClient) -> None:
    mine, other = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer other"}
    answer = (await http.post(RESPONSES, json=asking(), headers=mine)).json()
    where = f"{RESPONSES}/{answer['id']}"
    for headers in (other, {}):
        assert (await http.get(where, headers=headers)).status_code == 404
        assert (await http.delete(where, headers=headers)).status_code == 404
        body = asking(previous_response_id=answer["id"])
        assert (await http.post(RESPONSES, json=body, headers=headers)).status_code == 400
    assert (await http.get(where, headers=mine)).status_code == 200


async def test_the_key_is_asked_for(engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(create_app(LocalClient(engine), api_key="secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.post(RESPONSES, json=asking())).status_code == 401
        assert (await http.get(f"{RESPONSES}/resp_1")).status_code == 401
        assert (await http.delete(f"{RESPONSES}/resp_1")).status_code == 401


def test_what_was_not_used_for_longest_makes_room() -> None:
    def one(body: bytes = b"x" * 100) -> StoredResponse:
        return StoredResponse("me", body, (turn([{"role": "user", "content": "hi"}]),))

    archive = Archive(3 * one().size)
    for name in "abc":
        archive.keep(name, one())
    assert archive.find("me", "a")
    archive.keep("d", one())
    assert [bool(archive.find("me", name)) for name in "abcd"] == [True, False, True, True]
    archive.keep("huge", one(b"x" * 4 * one().size))
    assert archive.find("me", "huge") is None
    assert archive.find("me", "a")
    assert archive.drop("me", "a")
    archive.keep("e", one())
    assert all(archive.find("me", name) for name in "cde")
    archive.keep("large", one(b"x" * (100 + one().size)))
    assert [bool(archive.find("me", name)) for name in ("c", "d", "e", "large")] == [False, False, True, True]


def test_a_conversation_counts_whole() -> None:
    """What is shared with others counts for each: then nothing that is given up can be held by another."""
    turns = (turn([{"role": "user", "content": "hi"}]), turn([{"role": "user", "content": "\N{EM DASH}"}]))
    assert StoredResponse("", b"x" * 10, turns).size == OVERHEAD + 10 + sum(map(len, turns)) + 2 * OF_A_TURN
    assert [m["content"] for m in StoredResponse("", b"", turns).messages()] == ["hi", "\N{EM DASH}"]
