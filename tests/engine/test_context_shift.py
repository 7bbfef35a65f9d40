"""A text that fills the context and goes on: which tokens stay, and that the rest is computed as new."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hetrun.api.local_model import LocalModel
from hetrun.client.events import ContextShift, Event, GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.engine.slot_manager import after_shift, shortened
from hetrun.errors import ContextFull
from tests.models.cases import GQA
from tests.models.tiny import random_tokens
from tests.support.rig import model_file

CONTEXT = 48
PROMPT = random_tokens(30, seed=1)
GREEDY = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LocalModel]:
    options: dict[str, Any] = {"ctx": CONTEXT, "deterministic": True, "precision": "fast"}
    with LocalModel(model_file(GQA), backends=["reference"], **options) as model:
        yield model


def answer(llm: LocalModel, request: GenerateRequest) -> tuple[list[int], Event]:
    events = list(llm.stream_request(request))
    return [event.token for event in events if event.token is not None], events[-1]


@pytest.mark.parametrize("shift", [ContextShift(True), ContextShift(True, 20), ContextShift(True, -1, 5)])
def test_it_goes_on_as_the_shorter_text_would(llm: LocalModel, shift: ContextShift) -> None:
    found, end = answer(llm, GenerateRequest(GREEDY, tokens=tuple(PROMPT), shift=shift))
    tokens, expected, dropped = list(PROMPT), list[int](), 0
    while len(expected) < 80:
        room = min(CONTEXT - len(tokens), 80 - len(expected))
        part = answer(llm, GenerateRequest(replace(GREEDY, max_tokens=room), tokens=tuple(tokens)))[0]
        expected += part
        tokens += part
        if len(tokens) == CONTEXT and len(expected) < 80:
            kept = after_shift(tokens, shift, len(PROMPT), CONTEXT)
            dropped += len(tokens) - len(kept)
            tokens = kept
    assert found == expected
    assert (end.finish_reason, end.usage.completion_tokens, end.usage.prompt_tokens) == ("length", 80, 30)
    assert end.dropped == dropped > 0


def test_without_it_the_answer_ends_where_the_context_is_full(llm: LocalModel) -> None:
    found, end = answer(llm, GenerateRequest(GREEDY, tokens=tuple(PROMPT)))
    assert (len(found), end.finish_reason) == (CONTEXT - len(PROMPT), "length")
    assert end.dropped == 0


def test_an_answer_without_a_limit_ends_all_the_same(llm: LocalModel) -> None:
    request = GenerateRequest(
        replace(GREEDY, max_tokens=None), tokens=tuple(PROMPT), shift=ContextShift(True)
    )
    found, end = answer(llm, request)
    assert (len(found), end.finish_reason) == (CONTEXT, "length")


def test_a_prompt_that_is_too_long_loses_its_middle(llm: LocalModel) -> None:
    long = random_tokens(200, seed=2)
    few = replace(GREEDY, max_tokens=4)
    found, end = answer(llm, GenerateRequest(few, tokens=tuple(long), shift=ContextShift(True, 4)))
    kept = shortened(long, ContextShift(True, 4), CONTEXT)
    assert kept[:4] == long[:4]
    assert len(kept) < CONTEXT
    assert len(found) == 4
    assert found[:2] == answer(llm, GenerateRequest(few, tokens=tuple(kept)))[0]  # then it is full
    assert end.usage.prompt_tokens == len(kept) == 46
    assert end.dropped > 200 - len(kept)
    with pytest.raises(ContextFull):
        answer(llm, GenerateRequest(few, tokens=tuple(long)))


@pytest.mark.parametrize("keep", [-1, 0, 1, 47, 48, 10**9])
@pytest.mark.parametrize("discard", [0, 1, 10**9])
@pytest.mark.parametrize("n_prompt", [1, 30, 47])
def test_something_stays_and_something_goes(keep: int, discard: int, n_prompt: int) -> None:
    tokens = list(range(CONTEXT))
    kept = after_shift(tokens, ContextShift(True, keep, discard), n_prompt, CONTEXT)
    assert 0 < len(kept) < CONTEXT
    assert kept[-1] == tokens[-1]
    assert kept == sorted(set(kept) & set(tokens))


@pytest.mark.parametrize("keep", [-1, 0, 3, 10**9])
@pytest.mark.parametrize("context", [8, 48, 100])
@pytest.mark.parametrize("n", [7, 48, 49, 100, 101, 1000])
def test_a_shortened_prompt_fits(keep: int, context: int, n: int) -> None:
    tokens = list(range(n))
    kept = shortened(tokens, ContextShift(True, keep), context)
    assert 0 < len(kept) < context
    assert kept[-1] == tokens[-1]
    assert kept == tokens if n < context else len(kept) < n


def test_as_in_llama_cpp() -> None:
    """301 tokens in a context of 128: blocks of 64 go, and 109 tokens are left."""
    assert shortened(list(range(301)), ContextShift(True), 128) == list(range(192, 301))
