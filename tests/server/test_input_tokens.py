"""The tokens of a request's prompt, counted without an answer; and the progress of prompts in streams."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.server.test_api import error_of
from tests.support.fakes import FakeEngine

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_the_tokens_of_a_conversation(http: httpx.AsyncClient, engine: FakeEngine, prefix: str) -> None:
    said = (await http.post(f"{prefix}/chat/completions/input_tokens", json={"messages": HELLO})).json()
    assert said == {"object": "response.input_tokens", "input_tokens": 1 + len("[user]hello{}")}
    body = {"input": "hello", "instructions": "be brief"}
    said = (await http.post(f"{prefix}/responses/input_tokens", json=body)).json()
    assert said["input_tokens"] == 1 + len("[system]be brief[user]hello{}")
    assert engine.requests == []


async def test_tools_and_options_of_the_template_count(http: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": HELLO, "tools": tools, "chat_template_kwargs": {"style": "short"}}
    said = (await http.post("/v1/chat/completions/input_tokens", json=body)).json()
    rendered = f"[user]hello{ {'style': 'short', 'tools': tuple(tools)} }"
    assert said["input_tokens"] == 1 + len(rendered)


async def test_a_conversation_that_is_continued(http: httpx.AsyncClient) -> None:
    first = (await http.post("/v1/responses", json={"input": "say a"})).json()
    body = {"input": "more", "previous_response_id": first["id"]}
    said = (await http.post("/v1/responses/input_tokens", json=body)).json()
    assert said["input_tokens"] == 1 + len("[user]say a[assistant]a[user]more{}")


async def test_what_is_wrong(http: httpx.AsyncClient) -> None:
    refused = await http.post("/v1/chat/completions/input_tokens", json={"messages": []})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "messages")
    body = {"input": "a", "reasoning": {"effort": 5}}
    refused = await http.post("/v1/responses/input_tokens", json=body)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "reasoning.effort")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say one"}]}),
        ("/v1/completions", {"prompt": "say one"}),
        ("/v1/responses", {"input": "say one"}),
    ],
)
async def test_streams_tell_the_progress_of_the_prompt(
    http: httpx.AsyncClient, path: str, body: dict[str, object]
) -> None:
    async def progress(**more: object) -> list[dict[str, int]]:
        response = await http.post(path, json={**body, "stream": True, **more})
        lines = [line.removeprefix("data: ") for line in response.text.split("\n")]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        assert "one" in response.text
        return [event["prompt_progress"] for event in events if "prompt_progress" in event]

    assert await progress(return_progress=True) == [
        {"total": 7, "cache": 3, "processed": 3, "time_ms": 250},
        {"total": 7, "cache": 3, "processed": 7, "time_ms": 250},
    ]
    assert await progress() == []
