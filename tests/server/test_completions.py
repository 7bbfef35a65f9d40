"""The older endpoint: prompts in four forms, echoes and scores, the best of several answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from hetrun.client.events import TokenLogprob
from hetrun.server import request as orders
from hetrun.server.json_stream import json_text
from hetrun.server.logprobs import Echo, Offsets, legacy
from tests.server.test_api import chunks_of, error_of
from tests.support.fakes import FakeEngine

PATH = "/v1/completions"


async def answer_of(http: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    response = await http.post(PATH, json=fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_a_whole_answer(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await answer_of(http, prompt="say hello world")
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "fake"
    assert answer["choices"] == [
        {"text": "hello world", "index": 0, "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"]["total_tokens"] == 9
    (request,) = engine.requests
    assert (request.text, request.params.max_tokens, request.echo) == ("say hello world", 16, False)
    assert (request.params.logprobs, request.params.prompt_logprobs) == (None, None)


async def test_the_same_without_the_version(http: httpx.AsyncClient) -> None:
    for path in ("/completions", "/chat/completions"):
        body = {"prompt": "say hi", "messages": [{"role": "user", "content": "say hi"}]}
        assert (await http.post(path, json=body)).status_code == 200


async def test_a_streamed_answer(http: httpx.AsyncClient) -> None:
    body = {"prompt": "say hello world", "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = chunks_of(await http.post(PATH, json=body))
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hello ", "world", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 9)
    assert last["timings"]["predicted_n"] == 2


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["say a", "say b"], ["a", "b"]),
        (list(b"say c"), ["c"]),
        ([list(b"say d"), "say e", list(b"say f")], ["d", "e", "f"]),
    ],
)
async def test_prompts(http: httpx.AsyncClient, engine: FakeEngine, prompt: object, texts: list[str]) -> None:
    answer = await answer_of(http, prompt=prompt)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    assert answer["usage"]["prompt_tokens"] == 7 * len(texts)


async def test_each_prompt_has_n_answers_in_order(http: httpx.AsyncClient) -> None:
    answer = await answer_of(http, prompt=["say a", "say b"], n=3)
    assert [choice["text"] for choice in answer["choices"]] == ["a", "a", "a", "b", "b", "b"]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"] == {
        "prompt_tokens": 14,
        "completion_tokens": 6,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 6},
    }


# --- scores


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_an_echo_with_scores(http: httpx.AsyncClient, stream: bool, n: int) -> None:
    body = {"prompt": "say hello world", "echo": True, "logprobs": 1, "stream": stream, "n": n}
    response = await http.post(PATH, json=body)
    found: list[dict[str, list[Any]]] = []
    for index in range(n):
        if stream:
            choices = [c for chunk in chunks_of(response) for c in chunk["choices"] if c["index"] == index]
            text = "".join(choice["text"] for choice in choices)
            parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            scores = {name: [x for part in parts for x in part[name]] for name in parts[0]}
        else:
            choice = response.json()["choices"][index]
            text, scores = choice["text"], choice["logprobs"]
        assert text == "say hello worldhello world"
        found.append(scores)
    assert found[0] == {
        "tokens": ["say ", "hello ", "world", "hello ", "world", "<end>"],
        "token_logprobs": [None, -0.2, -0.2, -0.5, -0.5, -0.25],
        "top_logprobs": [
            None,
            {"A": -0.1, "hello ": -0.2},
            {"A": -0.1, "world": -0.2},
            {"A": -1.0, "hello ": -0.5},
            {"A": -1.0, "world": -0.5},
            {"<end>": -0.25},
        ],
        "text_offset": [0, 4, 10, 15, 21, 26],
    }
    for others in found[1:]:  # what is said of the prompt was computed once
        assert others["token_logprobs"][:4] == [None, -0.2, -0.2, -0.25]
        assert (others["tokens"], others["text_offset"]) == (found[0]["tokens"], found[0]["text_offset"])


async def test_the_prompt_is_scored_for_the_first_choice_only(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await answer_of(http, prompt="say a", echo=True, logprobs=0, n=3)
    assert [r.params.prompt_logprobs for r in engine.requests] == [0, None, None]
    assert [r.echo for r in engine.requests] == [True, False, False]


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_but_the_prompt_and_its_scores(http: httpx.AsyncClient, stream: bool) -> None:
    """What harnesses ask that compare continuations."""
    body = {"prompt": list(b"abc"), "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    response = await http.post(PATH, json=body)
    choice = (chunks_of(response) if stream else [response.json()])[0]["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -0.2, -0.2],
        "top_logprobs": None,
        "text_offset": [0, 1, 2],
    }


async def test_an_echo_without_scores(http: httpx.AsyncClient) -> None:
    for body in ({"max_tokens": 0}, {}):
        answer = await answer_of(http, prompt=list(b"say a"), echo=True, **body)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["logprobs"]) == ("say a" + ("a" if not body else ""), None)


async def test_llama_cpp_s_names(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await answer_of(http, prompt="forever", n_predict=2, n_probs=2)
    assert answer["choices"][0]["logprobs"]["top_logprobs"][0] == {
        "A": -1.0,
        "bytes:\\xc3": -2.0,
        "ha ": -0.5,
    }
    await answer_of(http, prompt="say a", n_predict=-1)
    assert [r.params.max_tokens for r in engine.requests] == [2, None]


async def test_the_best_answers(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    """The fake's scores grow with each request."""
    answer = await answer_of(http, prompt="forever", max_tokens=1, n=2, best_of=4, logprobs=0)
    scores = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
    assert scores == [[-0.125], [-0.5 / 3]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 4
    plain = await answer_of(http, prompt="forever", max_tokens=1, best_of=2)
    assert plain["choices"][0]["logprobs"] is None
    assert engine.requests[-1].params.logprobs == 0


def test_offsets_count_characters_of_the_text() -> None:
    # A token that begins, and a blank that the tokenizer puts in front, are no part of the text.
    text, pieces = "a\N{GRINNING FACE}", [b"<s>", b" a", b"\xf0\x9f", b"\x98\x80"]
    echo = Echo(text, pieces, [scored(b"")] * 3)
    answer = [scored("\N{LATIN SMALL LETTER E WITH ACUTE}".encode()), scored(b"x")]
    found = read(legacy(echo, answer, Offsets(len(text)), 0))
    assert found["text_offset"] == [0, 0, 1, 1, 2, 3]
    assert found["tokens"] == [
        *("<s>", " a", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80"),
        *("\N{LATIN SMALL LETTER E WITH ACUTE}", "x"),
    ]
    assert found["token_logprobs"] == [None, *[-1.0] * 5]
    assert found["top_logprobs"] is None


def test_scores_are_numbers_that_json_knows() -> None:
    answer = [TokenLogprob(1, float("-inf"), ((2, float("-inf")),), b"a", (b"a",))]
    found = read(legacy(None, answer, Offsets(), 1))
    assert (found["token_logprobs"], found["top_logprobs"]) == ([-9999.0], [{"a": -9999.0}])


def read(said: object) -> dict[str, Any]:
    """As a client has it."""
    found = json.loads(json_text(said))
    assert isinstance(found, dict)
    return found


def scored(piece: bytes) -> TokenLogprob:
    return TokenLogprob(1, -1.0, (), piece)


# --- refusals


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": 3}, "prompt", "invalid_type"),
        ({"prompt": {}}, "prompt", "invalid_type"),
        ({"prompt": []}, "prompt", "empty_array"),
        ({"prompt": [[]]}, "prompt[0]", "empty_array"),
        ({"prompt": [True]}, "prompt[0]", "invalid_type"),
        ({"prompt": ["a", 3]}, "prompt[1]", "invalid_type"),
        ({"prompt": [3, "a"]}, "prompt[1]", "invalid_value"),
        ({"prompt": [1.5]}, "prompt[0]", "invalid_value"),
        ({"prompt": [-1]}, "prompt[0]", "invalid_value"),
        ({"prompt": [[65], [65, 256]]}, "prompt[1][1]", "invalid_value"),
        ({"prompt": [1] * 2049}, "prompt", "context_length_exceeded"),
        ({"prompt": ["a"] * 513}, "prompt", "array_above_max_length"),
        ({"prompt": ["a"] * 5, "n": 128}, "n", "invalid_value"),
        ({"suffix": "end"}, "suffix", "not_supported"),
        ({"suffix": 5}, "suffix", "invalid_type"),
        ({"echo": "yes"}, "echo", "invalid_type"),
        ({"logprobs": 6}, "logprobs", "invalid_value"),
        ({"logprobs": -1}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens", "invalid_value"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n", "invalid_value"),
        ({"n_predict": -3}, "n_predict", "invalid_value"),
        ({"best_of": 0}, "best_of", "invalid_value"),
        ({"best_of": 129}, "best_of", "invalid_value"),
        ({"best_of": 2, "n": 3}, "best_of", "invalid_value"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of", "invalid_value"),
        ({"prompt": ["a"] * 128, "logprobs": 5, "max_tokens": 2000}, "logprobs", "invalid_value"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora", "unsupported_parameter"),
        ({"image_data": [{"data": "x"}]}, "image_data", "unsupported_parameter"),
        ({"tools": [{}]}, "tools", "unsupported_parameter"),
    ],
    ids=lambda x: str(x)[:50],
)
async def test_a_wrong_field_is_named(
    http: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, object], param: str, code: str
) -> None:
    response = await http.post(PATH, json={"prompt": "say a"} | fields)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert engine.requests == []


async def test_a_prompt_that_is_too_long_is_one_in_every_form(http: httpx.AsyncClient) -> None:
    for prompt in ("refuse", [65] * 5000, ["say a", "refuse"], [[65], [65] * 5000]):
        response = await http.post(PATH, json={"prompt": prompt})
        error = error_of(response)
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith("This model's maximum context length is 2048 tokens. ")
        assert error["param"].startswith("prompt")


async def test_strict_knows_every_field(strict: httpx.AsyncClient) -> None:
    body = {"model": "fake", "prompt": "say a", "suffix": None, "echo": False, "best_of": 1, "n": 1}
    body |= {"logprobs": 0, "n_probs": 0, "user": "me", "seed": 1, "stop": "x", "reasoning_effort": "low"}
    assert (await strict.post(PATH, json=body)).status_code == 200
    unfit: list[dict[str, object]] = [{"best_of": 21}, {"messages": []}, {"promt": "a"}]
    for fields in unfit:
        assert (await strict.post(PATH, json=body | fields)).status_code == 400


async def test_one_answer_may_have_as_many_scores_as_the_context_holds(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "MOST_SCORES", 1000)
    body = {"prompt": "say a", "logprobs": 5, "max_tokens": 2000}
    assert (await http.post(PATH, json=body)).status_code == 200
    assert (await http.post(PATH, json=body | {"n": 2})).status_code == 400
    assert (await http.post(PATH, json=body | {"n": 2, "max_tokens": 50})).status_code == 200


async def test_other_requests_have_their_turn_while_a_large_answer_is_written(
    http: httpx.AsyncClient,
) -> None:
    prompts = [list(b"abc")] * 200
    body = {"prompt": prompts, "echo": True, "logprobs": 0, "max_tokens": 0}
    large, small = await asyncio.gather(http.post(PATH, json=body), http.get("/health"))
    assert (large.status_code, small.status_code) == (200, 200)
    assert len(large.json()["choices"]) == 200
