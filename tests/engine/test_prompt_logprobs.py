"""Log-probabilities of the prompt's own tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hetrun.client.completion import completion
from hetrun.client.events import GenerateRequest, TokenLogprob
from hetrun.client.sampling_params import SamplingParams
from hetrun.engine import request_setup
from hetrun.errors import BackendError
from hetrun.executor.steps import Between, Step
from tests.engine.asking import SCRIPTS, Answer, Open, ask
from tests.engine.fakemodel import N_VOCAB, FakeModel

# The fake model expects inside a prompt what was there last.
LIKELY = 10 - math.log(math.exp(10) + N_VOCAB - 1)
UNLIKELY = LIKELY - 10


def scores(answer: Answer) -> list[TokenLogprob]:
    return [score for event in answer.events for score in event.prompt_logprobs]


def test_every_token_behind_the_first_has_one(open_engine: Open) -> None:
    answer = ask(open_engine(), "bbbc", prompt_logprobs=1).wait()
    found = scores(answer)
    assert [s.token for s in found] == list(b"bbc")
    assert [s.logprob for s in found] == pytest.approx([LIKELY, LIKELY, UNLIKELY], abs=1e-4)
    assert [(s.top[0][0], s.piece, s.top_pieces) for s in found] == [
        (98, b"b", (b"b",)),
        (98, b"b", (b"b",)),
        (98, b"c", (b"b",)),
    ]
    assert answer.text == "123456789"
    assert [e.kind for e in answer.events[:2]] == ["prompt", "token"]


def test_a_long_prompt_is_scored_in_pieces_of_bounded_size(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_setup, "PROMPT_ROWS", 4 * N_VOCAB * 5)
    model = FakeModel(SCRIPTS)
    answer = ask(open_engine(model), "b" * 23, prompt_logprobs=0).wait()
    assert [n for step in model.steps for _, n in step][:5] == [5, 5, 5, 5, 3]
    assert len(scores(answer)) == 22
    assert answer.last.usage.prompt_tokens == 23


def test_nothing_but_the_prompt(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS, context=4)
    answer = ask(open_engine(model), "bbbb", prompt_logprobs=0, max_tokens=0).wait()
    assert len(scores(answer)) == 3
    assert (answer.text, answer.last.finish_reason) == ("", "length")
    assert answer.last.usage.completion_tokens == 0
    assert model.freed == [0]


def test_one_token_has_nothing_before_it(open_engine: Open) -> None:
    answer = ask(open_engine(), "b", prompt_logprobs=3).wait()
    assert [e.kind for e in answer.events[:2]] == ["prompt", "token"]
    assert scores(answer) == []


def test_beside_another_sequence(open_engine: Open) -> None:
    engine = open_engine()
    scored, plain = engine.call(lambda _: (ask(engine, "bbb", prompt_logprobs=0), ask(engine, "a")))
    assert [s.logprob for s in scores(scored.wait())] == pytest.approx([LIKELY] * 2, abs=1e-4)
    assert (scored.text, plain.wait().text) == ("123456789", "Hello, world")


class Wrong(FakeModel):
    """Its results for prompts of more than one token are no numbers."""

    def step(self, step: Step, between: Between | None = None) -> np.ndarray:
        rows = super().step(step, between)
        return rows if len(step.chunks[0].tokens) == 1 else rows * np.float32("nan")


def test_results_that_are_no_numbers_end_the_request_alone(open_engine: Open) -> None:
    model = Wrong(SCRIPTS)
    engine = open_engine(model)
    assert isinstance(ask(engine, "bbb", prompt_logprobs=0).wait().last.error, BackendError)
    assert model.freed == [0]
    assert ask(engine, "b").wait().text == "123456789"


def test_what_the_tokens_of_the_prompt_stand_for(open_engine: Open) -> None:
    answer = Answer()
    engine = open_engine()
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    engine.submit(GenerateRequest(params, tokens=tuple(b"u\xc3!"), echo=True), answer)
    first, *others = answer.wait().events
    assert (first.kind, first.echo) == ("prompt", (b"u", b"\xc3", b"!"))
    assert not any(event.echo for event in others)
    assert len(scores(answer)) == 2


def test_an_echo_needs_a_tokenizer(open_engine: Open) -> None:
    answer = Answer()
    open_engine(tokenizer=False).submit(GenerateRequest(SamplingParams(), tokens=(97,), echo=True), answer)
    assert "tokenizer" in str(answer.wait().last.error)


def test_the_token_with_which_the_model_ends_has_one_too(open_engine: Open) -> None:
    engine = open_engine()
    answer = ask(engine, "b", logprobs=1, temperature=0).wait()
    end = answer.last.logprob
    assert end is not None
    assert end.top[0] == (end.token, end.logprob)
    assert end.token not in answer.tokens
    assert completion(answer.events).logprobs == [e.logprob for e in answer.events[:-1]]
    assert ask(engine, "b", logprobs=1, max_tokens=2).wait().last.logprob is None
    assert ask(engine, "b").wait().last.logprob is None
