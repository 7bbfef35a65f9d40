"""The engine on a scripted model: what requests give, alone and together."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hetrun.client.events import GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.engine import upkeep
from hetrun.errors import ContextFull, OptionError, TemplateError
from hetrun.executor.loading.memory_estimates import MAX_SEQUENCES
from tests.engine.asking import SCRIPTS, Answer, Open, ask, ask_together
from tests.engine.fakemodel import END, FakeModel


def test_tokens_come_one_by_one_and_then_the_end(open_engine: Open) -> None:
    answer = ask(open_engine(), "abc").wait()
    assert [e.kind for e in answer.events] == ["token"] * 12 + ["done"]
    assert answer.tokens == list(b"Hello, world")
    assert [e.text for e in answer.events] == [*"Hello, world", ""]
    assert answer.last.finish_reason == "stop"
    assert (answer.last.usage.prompt_tokens, answer.last.usage.completion_tokens) == (3, 12)
    timings = answer.last.timings
    assert timings.load_s >= 0
    assert timings.ttft_s > 0
    assert timings.prompt_tok_s > 0
    assert timings.decode_tok_s > 0


def test_half_a_character_waits_for_its_other_half(open_engine: Open) -> None:
    answer = ask(open_engine(), "u").wait()
    assert [e.text for e in answer.events] == ["G", "r", "", "ü", "", "ß", "e", ""]


def test_a_stop_string_ends_the_text_before_it(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS)
    answer = ask(open_engine(model), stop=["lo, w", "xyz"]).wait()
    assert answer.text == "Hel"
    assert answer.last.finish_reason == "stop"
    assert answer.last.usage.completion_tokens == len("Hello, w")
    assert model.freed == [0]


def test_what_may_begin_a_stop_string_comes_with_the_end(open_engine: Open) -> None:
    answer = ask(open_engine(), stop=["world!"]).wait()
    assert answer.text == "Hello, world"
    assert answer.last.text == "world"


def test_no_more_tokens_than_asked_for(open_engine: Open) -> None:
    answer = ask(open_engine(), max_tokens=5).wait()
    assert (answer.text, answer.last.finish_reason) == ("Hello", "length")
    assert answer.last.usage.completion_tokens == 5


def test_a_full_context_ends_an_answer(open_engine: Open) -> None:
    answer = ask(open_engine(FakeModel(SCRIPTS, context=20)), "l" * 12).wait()
    assert (answer.text, answer.last.finish_reason) == ("x" * 8, "length")


@pytest.mark.parametrize("length", [20, 21])
def test_a_prompt_that_leaves_no_room_for_an_answer(open_engine: Open, length: int) -> None:
    model = FakeModel(SCRIPTS, context=20)
    engine = open_engine(model)
    answer = ask(engine, "l" * length).wait()
    assert isinstance(answer.last.error, ContextFull)
    assert f"the prompt has {length} tokens, but the context holds 20" in str(answer.last.error)
    assert model.texts == {}
    assert ask(engine, "l" * 19).wait().text == "x"


def test_an_end_that_is_ignored(open_engine: Open) -> None:
    answer = ask(open_engine(), "b", ignore_eos=True, max_tokens=11).wait()
    assert answer.tokens == [*b"123456789", END, END]
    assert (answer.text, answer.last.finish_reason) == ("123456789", "length")


def test_log_probabilities_come_with_the_bytes_of_their_tokens(open_engine: Open) -> None:
    answer = ask(open_engine(), max_tokens=2, logprobs=2).wait()
    first = answer.events[0].logprob
    assert first is not None
    assert (first.token, first.piece) == (ord("H"), b"H")
    assert first.logprob == pytest.approx(10 - np.log(np.exp(10) + 256), abs=1e-4)
    assert first.top[0][0] == ord("H")
    assert len(first.top) == len(first.top_pieces) == 2


def test_a_model_without_a_tokenizer_takes_and_gives_numbers(open_engine: Open) -> None:
    engine, answer = open_engine(tokenizer=False), Answer()
    engine.submit(GenerateRequest(SamplingParams(max_tokens=3, logprobs=1), tokens=(97,)), answer)
    answer.wait()
    assert (answer.tokens, answer.text, answer.last.finish_reason) == (list(b"Hel"), "", "length")
    assert answer.events[0].logprob is not None
    assert answer.events[0].logprob.piece is None
    assert isinstance(ask(engine).wait().last.error, OptionError)


def test_messages_go_through_the_template(open_engine: Open) -> None:
    engine, answer = open_engine(), Answer()
    messages = ({"role": "user", "content": "b"}, {"role": "assistant", "content": "!"})
    engine.submit(GenerateRequest(SamplingParams(), messages=messages), answer)
    assert answer.wait().text == "123456789"
    assert answer.last.usage.prompt_tokens == 2


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (GenerateRequest(SamplingParams(), text=""), "the prompt is empty"),
        (GenerateRequest(SamplingParams(), tokens=()), "the prompt is empty"),
        (
            GenerateRequest(SamplingParams(), messages=({"content": ""},)),
            "the chat template produces no text",
        ),
        (
            GenerateRequest(SamplingParams(), tokens=(1, 257)),
            "token 1 of the prompt is 257; the vocabulary goes",
        ),
        (GenerateRequest(SamplingParams(), tokens=(-1,)), "token 0 of the prompt is -1"),
        (
            GenerateRequest(SamplingParams(logit_bias={300: 1}), text="a"),
            "logit_bias: token 300 does not exist",
        ),
    ],
)
def test_requests_that_cannot_be_run(open_engine: Open, request_: GenerateRequest, said: str) -> None:
    model, answer = FakeModel(SCRIPTS), Answer()
    engine = open_engine(model)
    engine.submit(request_, answer)
    answer.wait()
    assert isinstance(answer.last.error, (OptionError, TemplateError))
    assert said in str(answer.last.error)
    assert model.steps == []
    assert ask(engine).wait().text == "Hello, world"


def test_the_models_own_temperature_counts_when_the_request_names_none(open_engine: Open) -> None:
    """Greedy for one, and for the other so hot that the script is lost."""
    cold, hot = open_engine(temperature=0.0), open_engine(temperature=1e6)
    assert ask(cold, max_tokens=9).wait().text == "Hello, wo"
    options: dict[str, Any] = {
        "max_tokens": 9,
        "seed": 1,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "ignore_eos": True,
    }
    assert ask(hot, **options).wait().tokens != list(b"Hello, wo")
    assert ask(hot, temperature=0, max_tokens=9).wait().text == "Hello, wo"


def test_several_prompts_run_in_one_step(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS)
    answers = ask_together(open_engine(model), "ab", "b", "uuu")
    assert [a.wait().text for a in answers] == ["Hello, world", "123456789", "Grüße"]
    assert model.steps[0] == [(1, 1), (0, 2), (2, 3)]  # the one that lacks a single token first
    assert model.steps[1] == [(0, 1), (1, 1), (2, 1)]
    assert model.freed == [2, 1, 0]


def test_a_long_prompt_does_not_stop_an_answer(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS, ubatch=8)
    engine = open_engine(model)
    answers = engine.call(lambda _: [ask(engine, "b"), ask(engine, "a" * 20)])
    assert [a.wait().text for a in answers] == ["123456789", "Hello, world"]
    assert model.steps[:3] == [[(0, 1), (1, 7)]] * 2 + [[(0, 1), (1, 6)]]


def test_more_requests_than_places_wait_in_order(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS)
    answers = ask_together(open_engine(model), *(["b"] * MAX_SEQUENCES), "ab", "u")
    assert [a.wait().text for a in answers] == ["123456789"] * MAX_SEQUENCES + ["Hello, world", "Grüße"]
    assert max(len(step) for step in model.steps) == MAX_SEQUENCES
    assert all(seq < MAX_SEQUENCES for step in model.steps[:10] for seq, _ in step)


def test_with_few_places_in_a_step_all_take_turns(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS, ubatch=2)
    answers = ask_together(open_engine(model), "a", "b", "a")
    assert [a.wait().text for a in answers] == ["Hello, world", "123456789", "Hello, world"]
    assert [[seq for seq, _ in step] for step in model.steps[:6]] == [[0, 1], [2, 0], [1, 2]] * 2


def test_a_model_rests_when_nothing_comes(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "REST_S", 0.01)
    model = FakeModel(SCRIPTS)
    rested = threading.Event()
    monkeypatch.setattr(model, "rest", rested.set)
    engine = open_engine(model)
    assert rested.wait(10)
    assert ask(engine, "a").wait().text == "Hello, world"
