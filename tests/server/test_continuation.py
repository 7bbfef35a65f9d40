"""Requests whose last message is unfinished: what the template is told, what is refused, how it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.server.app import create_app
from tests.server.test_api import CHAT, error_of
from tests.support.fakes import FakeEngine

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Book?"},
    {"role": "assistant", "content": "say Whill"},
]
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
CONTINUED = {"continue_final_message": True}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, CONTINUED),
        ({"continue_final_message": None, "add_generation_prompt": None}, CONTINUED),
        ({"continue_final_message": True}, CONTINUED),
        ({"continue_final_message": True, "add_generation_prompt": False}, CONTINUED),
        ({"continue_final_message": "content"}, {"continue_final_message": "content"}),
        ({"continue_final_message": False}, {}),
        ({"add_generation_prompt": True}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ],
)
async def test_how_a_prompt_ends(
    http: httpx.AsyncClient, engine: FakeEngine, fields: Mapping[str, object], told: Mapping[str, object]
) -> None:
    response = await http.post(CHAT, json={"messages": TALK, **fields})
    assert response.status_code == 200
    assert engine.requests[-1].template_options == told


async def test_other_conversations_get_an_answer_of_their_own(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for last in (TALK[0], CALLED):
        assert (await http.post(CHAT, json={"messages": [TALK[0], last]})).status_code == 200
        assert engine.requests[-1].template_options == {}


async def test_parts_of_a_continued_message_are_one_text(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]
    for role, text in (("assistant", "Whill"), ("user", "Wh\nill")):
        await http.post(CHAT, json={"messages": [TALK[0], {"role": role, "content": parts}]})
        assert engine.requests[-1].messages is not None
        assert engine.requests[-1].messages[-1]["content"] == text


@pytest.mark.parametrize(
    ("messages", "fields", "param", "said"),
    [
        (
            TALK,
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "both",
        ),
        (
            TALK[:1],
            {"continue_final_message": True},
            "continue_final_message",
            "last message of the assistant",
        ),
        ([TALK[0], CALLED], {"continue_final_message": True}, "continue_final_message", "tool_calls"),
        (
            TALK,
            {"continue_final_message": "thoughts"},
            "continue_final_message",
            "must be true, false, content",
        ),
        (TALK, {"continue_final_message": "reasoning_content"}, "continue_final_message", "has no reasoning"),
        (TALK, {"continue_final_message": []}, "continue_final_message", "must be true"),
        (TALK, {"add_generation_prompt": "yes"}, "add_generation_prompt", "must be true or false"),
        (
            TALK,
            {"chat_template_kwargs": CONTINUED},
            "chat_template_kwargs.continue_final_message",
            "may not set",
        ),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/apply-template"])
async def test_what_is_refused(
    http: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    messages: list[dict[str, Any]],
    fields: Mapping[str, object],
    param: str,
    said: str,
) -> None:
    response = await http.post(path, json={"messages": messages, **fields})
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert said in str(error_of(response)["message"])
    assert engine.requests == []


async def test_a_strict_server_knows_the_fields(strict: httpx.AsyncClient) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    for path in (CHAT, "/apply-template", "/tokenize"):
        assert (await strict.post(path, json={"messages": TALK, **fields})).status_code == 200


async def test_templates_and_tokens_end_in_the_same_way(http: httpx.AsyncClient) -> None:
    response = await http.post("/apply-template", json={"messages": TALK})
    assert response.json()["prompt"].endswith(str(CONTINUED))
    response = await http.post("/apply-template", json={"messages": TALK[:1]})
    assert response.json()["prompt"].endswith("{'add_generation_prompt': True}")


async def test_a_response_is_a_new_message(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await http.post("/v1/responses", json={"input": TALK})).status_code == 200
    assert engine.requests[-1].template_options == {}


async def test_space_and_thoughts_go_on(engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(create_app(LocalClient(engine), reasoning_format="deepseek"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        last = {"role": "assistant", "content": "say  <think> is a mark"}
        answer = (await http.post(CHAT, json={"messages": [TALK[0], last]})).json()
        message = answer["choices"][0]["message"]
        assert "reasoning_content" not in message
        assert "<think>" in message["content"]
        last = {"role": "assistant", "content": "muse so</think>It is."}
        answer = (await http.post(CHAT, json={"messages": [TALK[0], last]})).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("so", "It is.")
