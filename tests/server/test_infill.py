"""POST /infill and `suffix` in completions: the prompt that is made, the answer, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from hetrun.server.llamacpp import infill
from tests.server.test_embeddings import error_of
from tests.support.fakes import INFO, FakeEngine

ASKED = {"input_prefix": "before", "input_suffix": "behind"}


@pytest.fixture
def engine(engine: FakeEngine) -> FakeEngine:
    engine.info = replace(INFO, fills=True)
    return engine


async def test_an_answer_in_llama_cpps_shape(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    extra = [{"filename": "a.py", "text": "x"}, {"text": "y"}]
    asked = ASKED | {"prompt": "begun", "input_extra": extra, "n_predict": 9, "temperature": 0}
    response = await http.post("/infill", json=asked)
    assert response.status_code == 200
    answer = response.json()
    assert answer["content"] == "before|behind|begun|9|a.py=x|tmp=y"
    assert (answer["stop"], answer["stop_type"], answer["tokens_evaluated"]) == (True, "eos", 7)
    assert answer["timings"]["predicted_n"] == answer["tokens_predicted"]
    assert engine.requests[0].params.temperature == 0


async def test_streamed(http: httpx.AsyncClient) -> None:
    response = await http.post("/infill", json=ASKED | {"stream": True})
    lines = [line for line in response.text.split("\n\n") if line]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(chunk["content"] for chunk in chunks) == "before|behind||None"
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_texts_with_tokens_between(http: httpx.AsyncClient) -> None:
    asked = {"input_prefix": ["a", 7, "b"], "input_suffix": []}
    assert (await http.post("/infill", json=asked)).json()["content"] == "('a', 7, 'b')|()||None"


async def test_suffix_of_completions(http: httpx.AsyncClient) -> None:
    asked = {"prompt": ["one", "two"], "suffix": "end", "max_tokens": 5, "n": 2}
    answer = (await http.post("/v1/completions", json=asked)).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["one|end||5"] * 2 + ["two|end||5"] * 2
    asked = {"prompt": list(b"abc"), "suffix": "end"}
    answer = (await http.post("/v1/completions", json=asked)).json()
    assert answer["choices"][0]["text"] == "(97, 98, 99)|end||16"
    for nothing in (None, ""):
        answer = (await http.post("/v1/completions", json={"prompt": "say it", "suffix": nothing})).json()
        assert answer["choices"][0]["text"] == "it"


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input_prefix": None}, "input_prefix", "missing_required_parameter"),
    ({"input_suffix": None}, "input_suffix", "missing_required_parameter"),
    ({"input_prefix": 5}, "input_prefix", "invalid_type"),
    ({"input_prefix": ["a", 256]}, "input_prefix[1]", "invalid_value"),
    ({"input_prefix": ["a", {}]}, "input_prefix[1]", "invalid_value"),
    ({"input_suffix": ["a"] * (infill.MOST_PARTS + 1)}, "input_suffix", "array_above_max_length"),
    ({"input_prefix": "refuse"}, "input_prefix", "invalid_value"),
    ({"input_extra": [{"text": "refuse"}]}, "input_extra", "invalid_value"),
    ({"prompt": ["a"]}, "prompt", "invalid_type"),
    ({"input_extra": {}}, "input_extra", "invalid_type"),
    ({"input_extra": ["a"]}, "input_extra[0]", "invalid_type"),
    ({"input_extra": [{"text": "a"}, {"filename": "a"}]}, "input_extra[1].text", "invalid_type"),
    ({"input_extra": [{"text": "a", "filename": 5}]}, "input_extra[0].filename", "invalid_type"),
    (
        {"input_extra": [{"text": "a", "filename": "f" * 5000}]},
        "input_extra[0].filename",
        "string_above_max_length",
    ),
    ({"input_extra": [{"text": ""}] * (infill.MOST_SNIPPETS + 1)}, "input_extra", "array_above_max_length"),
    ({"input_extra": [{"text": "x" * (1 << 19)}] * 3}, "input_extra", "string_above_max_length"),
    ({"n_predict": -7}, "n_predict", "invalid_value"),
    ({"temperature": -1}, "temperature", "invalid_value"),
]


@pytest.mark.parametrize(("wrong", "param", "code"), WRONG)
async def test_wrong_requests(wrong: dict[str, Any], param: str, code: str, http: httpx.AsyncClient) -> None:
    response = await http.post("/infill", json={**ASKED, **wrong})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)


async def test_echo_has_no_place_in_a_gap(http: httpx.AsyncClient) -> None:
    asked = {"prompt": "say", "suffix": "end", "echo": True}
    assert error_of(await http.post("/v1/completions", json=asked))["param"] == "echo"


async def test_models_without_the_tokens(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.info = INFO
    response = await http.post("/infill", json=ASKED)
    assert (response.status_code, error_of(response)["code"]) == (501, "not_supported")
    assert "fake cannot fill in the middle of a text" in error_of(response)["message"]
    response = await http.post("/v1/completions", json={"prompt": "say", "suffix": "end"})
    assert (response.status_code, error_of(response)["param"]) == (400, "suffix")
