"""Embeddings among answers and prompts: how steps are shared, and what becomes of who waits."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from hetrun.client.events import Event, GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.engine.engine import Engine
from hetrun.errors import BackendError, ContextFull, OptionError
from hetrun.executor.loading.memory_estimates import MAX_SEQUENCES
from hetrun.executor.steps import Between, Step
from hetrun.graph.pooling import Pooling
from tests.engine.asking import SCRIPTS, Answer, Open, ask
from tests.engine.fakemodel import FakeModel
from tests.engine.test_standing_aside import LONG, Aside


def embed(engine: Engine, text: str, pooling: Pooling = "mean", client: str = "") -> Answer:
    answer = Answer()
    request = GenerateRequest(SamplingParams(), text=text, pooling=pooling, client=client)
    answer.id = engine.submit(request, answer)
    return answer


def vector(answer: Answer) -> list[float]:
    """The scripted model's: the last token, the one before it, how many there are, and 1."""
    (done,) = answer.wait().events
    assert done.embedding is not None
    return list(struct.unpack("<4f", done.embedding))


class Kinds(FakeModel):
    """Notes of each step whether it was one of embeddings."""

    kinds: list[bool]

    def step(self, step: Step, between: Between | None = None) -> np.ndarray:
        self.kinds = [*getattr(self, "kinds", []), step.hidden]
        return super().step(step, between)


def test_each_pooling(open_engine: Open) -> None:
    engine = open_engine()
    assert vector(embed(engine, "\x01\x02\x06", "mean")) == [3, 1, 2, 1]
    assert vector(embed(engine, "\x01\x02\x06", "last")) == [6, 2, 3, 1]
    assert vector(embed(engine, "\x01\x02\x06", "cls")) == [1, 0, 1, 1]
    done = embed(engine, "abc").wait().last
    assert (done.kind, done.finish_reason, done.usage.prompt_tokens) == ("done", "stop", 3)
    assert done.usage.completion_tokens == 0
    assert done.timings.prompt_tok_s > 0


def test_a_long_text_is_summed_as_it_comes(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS, ubatch=5)
    engine = open_engine(model)
    assert vector(embed(engine, "\x02" * 23)) == pytest.approx([2, 2 * 22 / 23, 12, 1])
    assert [n for step in model.steps for _, n in step] == [5, 5, 5, 5, 3]
    assert vector(embed(engine, "\x02" * 23, "cls")) == [2, 0, 1, 1]
    assert vector(embed(engine, "\x02" * 23, "last")) == [2, 2, 23, 1]
    assert model.held == 0


def test_many_texts_go_together(open_engine: Open) -> None:
    model = Kinds(SCRIPTS, ubatch=64)
    engine = open_engine(model)
    answers = engine.call(lambda _: [embed(engine, chr(i) * 8, "last") for i in range(20)])
    assert [vector(answer)[0] for answer in answers] == list(range(20))
    assert [sum(n for _, n in step) for step in model.steps] == [64, 64, 32]
    assert model.kinds == [True] * 3


def test_texts_of_one_token_are_no_answers(open_engine: Open) -> None:
    """One token is missing, as of a running answer: they are not mixed, drafted for or sampled."""
    model = Kinds(SCRIPTS)
    engine = open_engine(model)
    texts, answer = engine.call(lambda _: ([embed(engine, c) for c in "xyz"], ask(engine, "a")))
    assert [vector(text)[0] for text in texts] == [*b"xyz"]
    assert answer.wait().text == "Hello, world"
    assert model.kinds.count(True) == 1
    assert all(len(step) == 3 for step, kind in zip(model.steps, model.kinds, strict=True) if kind)


def test_where_a_pass_cannot_stand_aside_embeddings_and_answers_take_turns(open_engine: Open) -> None:
    model = Kinds(SCRIPTS, ubatch=8, context=200)
    engine = open_engine(model)
    answer, texts = engine.call(
        lambda _: (ask(engine, "l", max_tokens=20), [embed(engine, "x" * 8) for _ in range(20)])
    )
    for each in (answer, *texts):
        each.wait()
    first = model.kinds.index(True)
    assert model.kinds[first : first + 38] == [True, False] * 19
    assert answer.text == "x" * 20


def test_answers_go_on_in_the_middle_of_a_long_text(open_engine: Open) -> None:
    during: list[int] = []
    model = Aside(within=lambda pause: during.append(len(answer.events)))
    engine = open_engine(model)
    answer = Answer()
    _, text = engine.call(
        lambda _: (ask(engine, "l", answer, max_tokens=100), embed(engine, "x" * LONG, client="b"))
    )
    assert vector(text)[0] == ord("x")
    assert answer.wait().text == "x" * 100
    assert during[-1] > during[0]


def test_a_flood_of_texts_does_not_keep_another_client_out(open_engine: Open) -> None:
    """Behind those that have places already, who was given least goes first."""
    engine = open_engine(Kinds(SCRIPTS, ubatch=8))
    ended: list[str] = []

    def submit(client: str, pooling: Pooling | None) -> Answer:
        answer = Answer()

        def on_event(event: Event) -> None:
            if event.last:
                ended.append(client)
            answer(event)

        params = SamplingParams(max_tokens=3)
        engine.submit(GenerateRequest(params, text="a" * 8, pooling=pooling, client=client), on_event)
        return answer

    def begin(_: object) -> list[Answer]:
        return [*(submit("flood", "mean") for _ in range(2 * MAX_SEQUENCES)), submit("other", None)]

    *flood, other = engine.call(begin)
    assert other.wait().text == "Hel"
    assert all(vector(answer)[0] == ord("a") for answer in flood)
    assert ended.index("other") < MAX_SEQUENCES + 10


def test_memory_that_runs_out_costs_a_text_its_rows_and_not_its_sum(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS, ubatch=4, context=64, ram=40)
    engine = open_engine(model)
    answers = engine.call(lambda _: [ask(engine, "l", max_tokens=30), embed(engine, "\x02" * 20)])
    assert answers[0].wait().text == "x" * 30
    assert vector(answers[1]) == pytest.approx([2, 2 * 19 / 20, 10.5, 1])


def test_what_is_refused(open_engine: Open) -> None:
    engine = open_engine(FakeModel(SCRIPTS, context=4))
    error = embed(engine, "abcde").wait().last.error
    assert isinstance(error, ContextFull)
    assert "the text has 5 tokens, but the context holds 4; shorten it" in str(error)
    assert vector(embed(engine, "abcd"))[2] == 2.5
    without = embed(open_engine(FakeModel(SCRIPTS, width=0)), "a").wait().last.error
    assert isinstance(without, OptionError)
    assert "embeddings are not available" in str(without)


def test_hidden_states_that_are_no_numbers(open_engine: Open) -> None:
    class Wrong(FakeModel):
        def step(self, step: Step, between: Between | None = None) -> np.ndarray:
            return super().step(step, between) * np.float32("nan")

    error = embed(open_engine(Wrong(SCRIPTS)), "abc").wait().last.error
    assert isinstance(error, BackendError)
    assert "not numbers" in str(error)


def test_one_that_is_cancelled_does_not_end_the_others(open_engine: Open) -> None:
    model = FakeModel(
        SCRIPTS, before=lambda model, step: model.block(step) if len(model.steps) == 1 else None
    )
    engine = open_engine(model)
    first, second = engine.call(lambda _: [embed(engine, "abc"), embed(engine, "\x02\x02", "last")])
    assert model.inside.wait(30)
    engine.cancel(first.id)
    last = first.wait().last
    assert (last.finish_reason, last.embedding) == ("cancelled", None)
    assert vector(second) == [2, 2, 2, 1]
    assert model.held == 0
