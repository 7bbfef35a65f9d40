"""POST /completion in llama.cpp's own shape: its fields, answers and streams, and what is wrong."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

from hetrun.client.events import ContextShift
from hetrun.server.llamacpp.request import MOST_FIELDS
from tests.server.test_api import error_of
from tests.support.fakes import FakeEngine

PATH = "/completion"


async def answer(http: httpx.AsyncClient, **fields: object) -> Any:  # noqa: ANN401 - JSON
    response = await http.post(PATH, json={"prompt": "say one two three", **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(http: httpx.AsyncClient, **fields: object) -> list[dict[str, Any]]:
    response = await http.post(PATH, json={"prompt": "say one two", "stream": True, **fields})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert "[DONE]" not in lines
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", [PATH, "/completions"])
async def test_an_answer_has_llama_cpps_fields(http: httpx.AsyncClient, path: str) -> None:
    said = (await http.post(path, json={"prompt": "say one two three", "n_predict": 9})).json()
    settings, timings = said.pop("generation_settings"), said.pop("timings")
    assert said == {
        "index": 0,
        "content": "one two three",
        "tokens": [],
        "id_slot": 1,
        "stop": True,
        "model": "fake",
        "tokens_predicted": 3,
        "tokens_evaluated": 7,
        "prompt": "say one two three",
        "has_new_line": False,
        "truncated": False,
        "stop_type": "eos",
        "stopping_word": "",
        "tokens_cached": 3,
    }
    assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (4, 3, 3)
    assert (settings["n_predict"], settings["temperature"], settings["seed"]) == (9, 0.8, -1)
    assert (settings["n_ctx"], settings["stream"], settings["samplers"][0]) == (2048, False, "penalties")


async def test_without_v1_completions_is_llama_cpps_and_with_it_openais(http: httpx.AsyncClient) -> None:
    said = (await http.post("/v1/completions", json={"prompt": "say one"})).json()
    assert said["choices"][0]["text"] == "one"


@pytest.mark.parametrize(
    ("fields", "stop_type", "word"),
    [({"n_predict": 2}, "limit", ""), ({"stop": ["", "two"]}, "word", "two"), ({"stop": []}, "eos", "")],
)
async def test_why_an_answer_ended(
    http: httpx.AsyncClient, fields: dict[str, object], stop_type: str, word: str
) -> None:
    said = await answer(http, **fields)
    assert (said["stop_type"], said["stopping_word"]) == (stop_type, word)


async def test_tokens_of_the_answer_where_they_are_wanted(http: httpx.AsyncClient) -> None:
    assert (await answer(http, return_tokens=True))["tokens"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ([115, 97, 121, 32, 97], [b"say a"]),
        ([115, 97, "y", 32, 97], [b"say a"]),
        (["\x01", 97], [b"\x00\x01a"]),  # a text at the beginning gets the token that begins a text
        ([{"prompt_string": "say a"}], ["say a"]),
        ({"prompt_string": "say a", "multimodal_data": []}, ["say a"]),
        (["say a", [115, "ay b"], [115], {"prompt_string": "d"}], ["say a", b"say b", b"s", "d"]),
    ],
)
async def test_prompts_of_texts_and_tokens(
    http: httpx.AsyncClient, engine: FakeEngine, prompt: object, read: list[object]
) -> None:
    said = await answer(http, prompt=prompt)
    assert [r.text if r.tokens is None else bytes(r.tokens) for r in engine.requests] == read
    assert isinstance(said, list) == (len(read) > 1)


async def test_several_answers_are_numbered(http: httpx.AsyncClient) -> None:
    said = await answer(http, prompt=["say a", "say b"], n_cmpl=2)
    assert [(one["index"], one["content"]) for one in said] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]


async def test_parameters_in_llama_cpps_spellings(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    await answer(
        http,
        n_predict=5,
        max_tokens=7,
        samplers=["top_k", "typical_p", "typ_p", "tfs_z", "temperature"],
        logit_bias=[[65, 1.5], ["AB", -2], [67, False], {"token": 68, "bias": 3}],
        grammar="",
        json_schema={"type": "string"},
        repeat_last_n=-1,
    )
    params = engine.requests[-1].params
    assert (params.max_tokens, params.samplers) == (5, ("top_k", "typ_p", "temperature"))
    assert params.logit_bias == {65: -2.0, 66: -2.0, 67: -math.inf, 68: 3.0}
    assert params.json_schema == '{"type": "string"}'
    await answer(
        http, samplers="kpt", logit_bias={"A": 1, "66": False}, grammar="root ::= [a-z]", n_predict=-1
    )
    params = engine.requests[-1].params
    assert (params.max_tokens, params.samplers) == (None, ("top_k", "top_p", "temperature"))
    assert params.logit_bias == {65: 1.0, 66: -math.inf}
    assert params.grammar == "root ::= [a-z]"


async def test_how_a_request_uses_the_cache_the_context_and_its_place(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await answer(http, cache_prompt=False, id_slot=4, n_keep=-1, n_discard=8, t_max_predict_ms=1500)
    asked = engine.requests[-1]
    assert (asked.fresh, asked.slot, asked.line_limit_s) == (True, 4, 1.5)
    assert asked.shift == ContextShift(None, -1, 8)
    await answer(http, id_slot=-1, t_max_predict_ms=0)
    asked = engine.requests[-1]
    assert (asked.fresh, asked.slot, asked.line_limit_s, asked.shift) == (False, None, None, None)


async def test_no_tokens_at_all_only_computes_the_prompt(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    said = await answer(http, n_predict=0)
    assert (said["content"], said["tokens_predicted"], said["stop_type"]) == ("", 0, "limit")
    assert said["generation_settings"]["n_predict"] == 0
    assert engine.requests[-1].most_tokens == 0


async def test_probabilities_of_the_model_and_of_the_draw(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    own = (await answer(http, n_probs=2))["completion_probabilities"]
    assert own[0] == {
        "id": 1,
        "token": "one ",
        "bytes": list(b"one "),
        "logprob": -0.5,
        "top_logprobs": [
            {"id": 0, "token": "A", "bytes": [65], "logprob": -1.0},
            {"id": 1, "token": "", "bytes": [195], "logprob": -2.0},
        ],
    }
    drawn = (await answer(http, n_probs=1, post_sampling_probs=True))["completion_probabilities"]
    assert engine.requests[-1].sampled_logprobs
    assert drawn[0]["prob"] == pytest.approx(math.exp(-0.25))
    assert drawn[0]["top_probs"][0] == {"id": 0, "token": "A", "bytes": [65], "prob": math.exp(-1)}


async def test_a_stream_ends_with_everything_else(http: httpx.AsyncClient) -> None:
    *tokens, last = await streamed(http, n_probs=1)
    assert [(chunk["content"], chunk["tokens"], chunk["stop"]) for chunk in tokens] == [
        ("one ", [1], False),
        ("two", [2], False),
    ]
    assert tokens[1]["tokens_predicted"] == 2
    assert [len(chunk["completion_probabilities"]) for chunk in tokens] == [1, 1]
    assert (last["content"], last["tokens"], last["stop"], last["stop_type"]) == ("", [], True, "eos")
    assert last["prompt"] == "say one two"
    assert "timings" not in tokens[0]
    assert "completion_probabilities" not in last


async def test_progress_and_times_in_a_stream(http: httpx.AsyncClient) -> None:
    first, second, *tokens, _ = await streamed(http, return_progress=True, timings_per_token=True)
    assert first["prompt_progress"] == {"total": 7, "cache": 3, "processed": 3, "time_ms": 250}
    assert second["prompt_progress"]["processed"] == 7
    assert (first["content"], first["stop"]) == ("", False)
    assert [chunk["timings"]["predicted_n"] for chunk in tokens] == [1, 2]
    assert (tokens[0]["timings"]["prompt_n"], tokens[0]["timings"]["prompt_ms"]) == (4, 250)
    without = await streamed(http, timings_per_token=True)
    assert not any("prompt_progress" in chunk for chunk in without)


async def test_an_error_within_a_stream_is_its_last_event(http: httpx.AsyncClient) -> None:
    *_, last = await streamed(http, prompt="fail")
    assert last["error"]["code"] == "internal_error"


async def test_only_the_fields_that_are_wanted(http: httpx.AsyncClient) -> None:
    fields = ["content", "generation_settings/top_k", "nothing", "content/nothing"]
    assert await answer(http, top_k=3, response_fields=fields) == {
        "content": "one two three",
        "generation_settings/top_k": 3,
    }
    *_, last = await streamed(http, response_fields=["stop"])
    assert last == {"stop": True}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, 256]}, "prompt[1]"),
        ({"prompt": [1, "a", -1]}, "prompt[2]"),
        ({"prompt": [[1], True]}, "prompt[1]"),
        ({"prompt": ["a"] * 513}, "prompt"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, "prompt.multimodal_data[0]"),
        ({"n_predict": -3}, "n_predict"),
        ({"n_predict": 1.5}, "n_predict"),
        ({"n_cmpl": 0}, "n"),
        ({"n_probs": 129}, "n_probs"),
        ({"n_probs": -1}, "n_probs"),
        ({"n_keep": -2}, "n_keep"),
        ({"n_discard": -1}, "n_discard"),
        ({"n_discard": 2**31}, "n_discard"),
        ({"id_slot": -2}, "id_slot"),
        ({"t_max_predict_ms": -2}, "t_max_predict_ms"),
        ({"logit_bias": [[1]]}, "logit_bias[0]"),
        ({"logit_bias": [[{}, 1]]}, "logit_bias[0]"),
        ({"logit_bias": [{"token": [1], "bias": 1}]}, "logit_bias[0]"),
        ({"logit_bias": [[True, 1]]}, "logit_bias[0]"),
        ({"logit_bias": [[256, 1]]}, "logit_bias"),
        ({"logit_bias": "a"}, "logit_bias"),
        ({"samplers": ["no such"]}, "samplers"),
        ({"response_fields": "content"}, "response_fields"),
        ({"response_fields": [""] * (MOST_FIELDS + 1)}, "response_fields"),
        ({"n_indent": 4}, "n_indent"),
        ({"grammar_lazy": True}, "grammar_lazy"),
        ({"adaptive_target": 0.5}, "adaptive_target"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora"),
        ({"cache_prompt": "yes"}, "cache_prompt"),
        ({"post_sampling_probs": 1}, "post_sampling_probs"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": -1}, "temperature"),
    ],
)
async def test_what_is_wrong(http: httpx.AsyncClient, fields: dict[str, object], param: str) -> None:
    response = await http.post(PATH, json={"prompt": "say a", **fields})
    assert (response.status_code, error_of(response)["param"]) == (400, param), response.text


async def test_a_strict_server_knows_the_fields(strict: httpx.AsyncClient) -> None:
    assert (await strict.post(PATH, json={"prompt": "say a", "return_tokens": True})).status_code == 200
    refused = await strict.post(PATH, json={"prompt": "say a", "return_token": True})
    assert error_of(refused)["code"] == "unknown_parameter"
