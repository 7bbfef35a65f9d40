"""With a real engine: scores are those that the logits give, and what choices have in common is read once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from hetrun.api.local_model import LocalModel
from hetrun.client.engine_client import LocalClient
from hetrun.client.events import GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.server import parallel_sampling
from hetrun.server.app import create_app
from hetrun.server.fields import LogprobCount
from hetrun.server.request import Order
from tests.models.tiny import TinyLlama, write_gguf

TEXT = "A beginning, and how it goes on"
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalModel]:
    path = tmp_path_factory.mktemp("server") / "tiny.gguf"
    model = TinyLlama("tiny", layers=1, embd=64, ffn=64, heads=2, kv_heads=2)
    with LocalModel(write_gguf(model, path), backends=["reference"]) as opened:
        yield opened


@pytest.fixture
async def real(llm: LocalModel) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(LocalClient(llm)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


def expected(llm: LocalModel, tokens: list[int]) -> np.ndarray:
    """The log-probability of each token from the second on, by the logits before it."""
    logits = llm.logits(tokens).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    found = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return np.asarray(found[np.arange(len(tokens) - 1), tokens[1:]])


async def scored(http: httpx.AsyncClient, **fields: object) -> list[dict[str, Any]]:
    response = await http.post(PATH, json={"echo": True, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


@pytest.mark.parametrize("as_tokens", [False, True])
async def test_scores_of_a_prompt_are_those_of_the_logits(
    llm: LocalModel, real: httpx.AsyncClient, as_tokens: bool
) -> None:
    tokens = llm.tokenize(TEXT)
    prompt = tokens if as_tokens else TEXT
    (choice,) = await scored(real, prompt=prompt, logprobs=1, max_tokens=0)
    scores = choice["logprobs"]
    assert scores["token_logprobs"][0] is None
    assert scores["token_logprobs"][1:] == pytest.approx(expected(llm, tokens), abs=1e-4)
    assert choice["text"] == (llm.detokenize(tokens) if as_tokens else TEXT)
    for text, at in zip(scores["tokens"][2:], scores["text_offset"][2:], strict=True):
        assert choice["text"][at:].startswith(text)


async def test_a_continuation_is_the_same_in_one_prompt_or_behind_it(
    llm: LocalModel, real: httpx.AsyncClient
) -> None:
    """What harnesses ask for, one token of an answer with it, and several at a time."""
    tokens = llm.tokenize(TEXT)
    prompts = [tokens, tokens[:5], tokens]
    for choice, prompt in zip(
        await scored(real, prompt=prompts, logprobs=1, max_tokens=1), prompts, strict=True
    ):
        scores = choice["logprobs"]
        assert len(scores["tokens"]) == len(prompt) + 1
        assert scores["token_logprobs"][1:-1] == pytest.approx(expected(llm, prompt), abs=1e-4)
        for mine, best in zip(scores["token_logprobs"][1:], scores["top_logprobs"][1:], strict=True):
            assert max(best.values()) >= mine


async def test_a_model_that_ends_at_once_has_a_score_too(llm: LocalModel, real: httpx.AsyncClient) -> None:
    tokens = llm.tokenize(TEXT)
    ends = llm.call(lambda loaded: loaded.tokenizer.ends if loaded.tokenizer else frozenset())
    bias = {str(token): 1000 for token in ends}
    (choice,) = await scored(real, prompt=tokens, logprobs=1, max_tokens=1, logit_bias=bias)
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == llm.detokenize(tokens)
    assert len(choice["logprobs"]["tokens"]) == len(tokens) + 1


@pytest.mark.parametrize("whole", [False, True])
async def test_what_choices_begin_with_is_read_once(llm: LocalModel, whole: bool) -> None:
    tokens = tuple(5 + (i * 7919 + whole) % 200 for i in range(llm.info.context - 8))
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
    request = GenerateRequest(params, tokens=tokens, whole=whole)
    order = Order(llm.info, (request,), "prompt", LogprobCount(), n=5, tried=5)
    ends = {i: event async for i, event in parallel_sampling.events(LocalClient(llm), order) if event.last}
    assert [ends[i].kind for i in range(5)] == ["done"] * 5
    assert ends[0].usage.cached_tokens == 0
    assert all(ends[i].usage.cached_tokens > len(tokens) - 16 for i in range(1, 5))


async def test_seeded_answers_differ_and_come_again(llm: LocalModel, real: httpx.AsyncClient) -> None:
    body: dict[str, object] = {"prompt": TEXT, "seed": 7, "max_tokens": 8, "temperature": 2, "n": 3}
    first, again = [(await real.post(PATH, json=body)).json()["choices"] for _ in range(2)]
    assert [choice["text"] for choice in first] == [choice["text"] for choice in again]
    assert len({choice["text"] for choice in first}) == 3
    (alone,) = (await real.post(PATH, json=body | {"n": 1})).json()["choices"]
    assert alone["text"] == first[0]["text"]
