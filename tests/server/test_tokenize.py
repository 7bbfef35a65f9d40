"""Tokens and templates over HTTP: the fields of llama.cpp's clients and of vLLM's, limits, what is wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from hetrun.client.queries import Question, TokenizerInfo
from hetrun.errors import OptionError
from hetrun.server import query as asking_module
from hetrun.server.routes import tokenize
from tests.server.test_api import error_of
from tests.support.fakes import FakeEngine

HELLO = [{"role": "user", "content": "hello"}]
RENDERED = "[user]hello{'add_generation_prompt': True}"


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"content": "ab"}, [97, 98]),  # llama.cpp's: nothing added
        ({"content": "ab", "add_special": True}, [0, 97, 98]),
        ({"prompt": "ab"}, [0, 97, 98]),  # vLLM's: as a prompt
        ({"prompt": "ab", "add_special_tokens": False}, [97, 98]),
        ({"messages": HELLO}, list(RENDERED.encode())),
        ({"content": ""}, []),
    ],
)
async def test_tokens_of_a_text(http: httpx.AsyncClient, body: dict[str, object], tokens: list[int]) -> None:
    response = await http.post("/tokenize", json=body)
    assert (response.status_code, response.json()) == (
        200,
        {"tokens": tokens, "count": len(tokens), "max_model_len": 2048},
    )


async def test_pieces_are_texts_or_the_bytes_of_a_part_of_a_character(http: httpx.AsyncClient) -> None:
    response = await http.post("/tokenize", json={"content": "aü", "with_pieces": True})
    pieces = [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 188, "piece": [188]}]
    assert response.json()["tokens"] == pieces
    response = await http.post("/tokenize", json={"prompt": "a", "return_token_strs": True})
    assert response.json() == {
        "tokens": [0, 97],
        "count": 2,
        "max_model_len": 2048,
        "token_strs": ["\0", "a"],
    }


async def test_the_text_of_tokens(http: httpx.AsyncClient) -> None:
    response = await http.post("/detokenize", json={"tokens": [97, 195, 188, 195]})
    assert response.json() == {"content": "aü\ufffd", "prompt": "aü\ufffd"}
    assert (await http.post("/detokenize", json={"tokens": []})).json()["content"] == ""


async def test_a_template_is_applied(http: httpx.AsyncClient) -> None:
    body = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}
    response = await http.post("/apply-template", json=body | {"add_generation_prompt": False})
    said = "[user]hello{'enable_thinking': False, 'add_generation_prompt': False}"
    assert response.json() == {"prompt": said}
    tool = {"type": "function", "function": {"name": "now"}}
    response = await http.post("/apply-template", json={"messages": HELLO, "tools": [tool]})
    assert response.json() == {"prompt": f"[user]hello{{'add_generation_prompt': True, 'tools': {[tool]}}}"}


async def test_the_tokenizer_is_described(http: httpx.AsyncClient) -> None:
    assert (await http.get("/tokenizer_info")).json() == {
        "vocab_size": 256,
        "model_max_length": 2048,
        "add_bos_token": True,
        "bos_token": "<s>",
        "bos_token_id": 0,
        "eos_token": "</s>",
        "eos_token_id": 1,
        "chat_template": "{{ messages }}",
        "chat_template_origin": "the model",
    }


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "content", "missing_required_parameter"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "prompt", "invalid_value"),
        ("/tokenize", {"content": 5}, "content", "invalid_type"),
        ("/tokenize", {"content": [1, "a"]}, "content", "invalid_type"),
        ("/tokenize", {"content": "a", "with_pieces": 1}, "with_pieces", "invalid_type"),
        ("/tokenize", {"content": "a", "add_special": "yes"}, "add_special", "invalid_type"),
        ("/tokenize", {"content": "a", "model": 5}, "model", "invalid_type"),
        (
            "/tokenize",
            {"content": "a" * (tokenize.MOST_TEXT + 1)},
            "content",
            "string_above_max_length",
        ),
        (
            "/tokenize",
            {"content": "a" * (tokenize.MOST_SPELLED + 1), "with_pieces": True},
            "content",
            "string_above_max_length",
        ),
        ("/tokenize", {"messages": []}, "messages", "empty_array"),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": "a"}, "tokens", "invalid_type"),
        ("/detokenize", {"tokens": [1, "2"]}, "tokens[1]", "invalid_value"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]", "invalid_value"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "invalid_value"),
        ("/detokenize", {"tokens": [2**31]}, "tokens[0]", "invalid_value"),
        ("/detokenize", {"tokens": [0] * (tokenize.MOST_TOKENS + 1)}, "tokens", "array_above_max_length"),
        ("/apply-template", {}, "messages", "missing_required_parameter"),
        (
            "/apply-template",
            {"messages": HELLO, "tools": [{}]},
            "tools[0].function",
            "missing_required_parameter",
        ),
        (
            "/apply-template",
            {"messages": [{"content": "a"}]},
            "messages[0].role",
            "missing_required_parameter",
        ),
        (
            "/apply-template",
            {"messages": HELLO, "chat_template_kwargs": {"bos_token": "x"}},
            "chat_template_kwargs.bos_token",
            "invalid_value",
        ),
    ],
)
async def test_what_is_wrong_is_said(
    http: httpx.AsyncClient, path: str, body: dict[str, object], param: str, code: str
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == 400
    assert (error_of(response)["param"], error_of(response)["code"]) == (param, code)


async def test_unknown_fields_are_refused_only_strictly(
    http: httpx.AsyncClient, strict: httpx.AsyncClient
) -> None:
    body = {"content": "a", "parse_specials": True}
    assert (await http.post("/tokenize", json=body)).status_code == 200
    response = await strict.post("/tokenize", json=body)
    assert (response.status_code, error_of(response)["param"]) == (400, "parse_specials")


async def test_what_the_engine_refuses_is_the_field_s_fault(
    http: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(question: Question[Any]) -> None:
        raise OptionError("there is no token 300: the vocabulary goes from 0 to 255")

    monkeypatch.setattr(engine, "ask", refuse)
    response = await http.post("/detokenize", json={"tokens": [300]})
    assert (response.status_code, error_of(response)["param"]) == (400, "tokens")
    response = await http.post("/tokenize", json={"content": "x"})
    assert (response.status_code, error_of(response)["param"]) == (400, "content")


async def test_an_engine_that_does_not_answer_is_not_waited_for(
    http: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking_module.asked, "__defaults__", (0.05,))
    slow = {"messages": [{"role": "user", "content": "slow"}]}
    response = await http.post("/apply-template", json=slow)
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")
    assert response.headers["x-should-retry"] == "false"
    engine.slow.set()


async def test_requests_at_a_time_are_limited(
    http: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {"messages": [{"role": "user", "content": "slow"}]}
    asked = [
        asyncio.create_task(http.post("/apply-template", json=slow)) for _ in range(asking_module.MOST_ASKING)
    ]
    await asyncio.sleep(0.1)
    response = await http.post("/apply-template", json=slow)
    assert (response.status_code, error_of(response)["code"]) == (429, "overloaded")
    assert (await http.get("/health")).status_code == 200
    engine.slow.set()
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


async def test_a_model_without_a_tokenizer(
    http: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = engine.ask

    def ask(question: Question[Any]) -> object:
        if isinstance(question, TokenizerInfo):
            raise OptionError("there is no tokenizer for this model")
        return known(question)

    monkeypatch.setattr(engine, "ask", ask)
    response = await http.get("/tokenizer_info")
    assert (response.status_code, error_of(response)["message"]) == (
        400,
        "there is no tokenizer for this model",
    )
    assert (await http.get("/props")).json()["chat_template"] is None
