"""The engine on a scripted model: requests that are cancelled, and requests that fail."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from hetrun.client.events import Event
from hetrun.engine.cancellation import Gate
from hetrun.errors import BackendError, OptionError
from hetrun.executor.steps import Step
from tests.engine.asking import SCRIPTS, Answer, Open, ask, ask_together
from tests.engine.fakemodel import END, FakeModel


def test_a_request_is_cancelled_between_two_steps(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS)
    engine = open_engine(model)

    class AfterThree(Answer):
        def __call__(self, event: Event) -> None:
            super().__call__(event)
            if len(self.events) == 3:
                engine.cancel(self.id)

    first, second = engine.call(lambda _: [ask(engine, "l", AfterThree()), ask(engine, "a")])
    first.wait()
    assert [e.kind for e in first.events] == ["token"] * 3 + ["done"]
    assert (first.last.finish_reason, first.last.usage.completion_tokens) == ("cancelled", 3)
    assert second.wait().text == "Hello, world"
    assert not model.cancelled.is_set(), "nothing was computing when it was cancelled"


def test_a_request_is_cancelled_inside_a_step_and_the_others_go_on(open_engine: Open) -> None:
    def block_first(model: FakeModel, step: Step) -> None:
        if len(model.steps) == 3:
            model.block(step)

    model = FakeModel(SCRIPTS, before=block_first)
    engine = open_engine(model)
    first, second = ask_together(engine, "l", "a")
    assert model.inside.wait(30)
    engine.cancel(first.id)
    assert first.wait().last.finish_reason == "cancelled"
    assert first.text == "xx"
    assert second.wait().text == "Hello, world"
    assert model.steps[2] == [(0, 1), (1, 1)]
    assert model.steps[3] == [(1, 1)], "what was lost of the step was computed again"
    assert model.freed == [0, 1]


def test_a_request_is_cancelled_while_it_waits(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS, before=FakeModel.block)
    engine = open_engine(model)
    running = ask(engine, "a")
    assert model.inside.wait(30)
    waiting = ask(engine, "b")
    engine.cancel(waiting.id)
    assert not model.cancelled.is_set(), "it is not in this step"
    engine.cancel(running.id)
    assert waiting.wait().last.finish_reason == "cancelled"
    assert running.wait().last.finish_reason == "cancelled"
    assert len(model.prompts) == 1


def test_a_request_that_is_over_is_left_alone(open_engine: Open) -> None:
    engine = open_engine()
    answer = ask(engine).wait()
    engine.cancel(answer.id)
    engine.cancel(12345)
    assert ask(engine).wait().text == "Hello, world"
    assert len(answer.events) == 13


def gate() -> tuple[Gate, FakeModel]:
    gate, model = Gate(), FakeModel()
    gate.open(model)
    return gate, model


def test_what_it_does_says_how_far_it_is() -> None:
    g, model = gate()
    g.enter(frozenset((1,)), 0.5)
    model.stats.segments = 3
    doing = g.doing
    assert doing is not None
    assert (doing.expected_s, doing.what, doing.segments) == (0.5, "the script", 3)


def test_a_cancel_that_comes_just_before_its_step_is_heard() -> None:
    g, model = gate()
    g.cancel(1)
    assert not model.cancelled.is_set()
    assert not g.enter(frozenset((1, 2)))
    assert g.enter(frozenset((2,)))
    g.leave()
    g.forget(1)
    assert g.enter(frozenset((1, 2)))
    assert g.busy


def test_a_cancel_that_comes_too_late_does_not_stop_the_next_step() -> None:
    g, model = gate()
    assert g.enter(frozenset((1,)))
    g.cancel(1)
    assert model.cancelled.is_set()
    g.leave()
    assert not g.busy
    assert g.enter(frozenset((2,)))
    assert not model.cancelled.is_set()
    g.cancel(1)
    assert not model.cancelled.is_set()


def test_nothing_begins_behind_a_stop() -> None:
    g, model = gate()
    g.stop()
    assert not model.cancelled.is_set()
    assert not g.enter(frozenset((1,)))


def test_an_error_in_a_step_goes_to_its_requests_and_the_engine_lives(open_engine: Open) -> None:
    def fail(model: FakeModel, step: Step) -> None:
        if len(model.steps) == 2:
            raise BackendError("out of order")

    model = FakeModel(SCRIPTS, before=fail)
    engine = open_engine(model)
    answers = ask_together(engine, "a", "b")
    for answer in answers:
        assert [e.kind for e in answer.wait().events] == ["token", "error"]
        assert str(answer.last.error) == "out of order"
        assert answer.last.usage.completion_tokens == 1
    assert model.freed == [0, 1]
    assert ask(engine).wait().text == "Hello, world"


def test_an_error_in_a_step_spares_those_that_were_not_in_it(open_engine: Open) -> None:
    def fail(model: FakeModel, step: Step) -> None:
        if step.chunks[0].seq == 1 and len(model.texts[1]) > 3:
            raise BackendError("out of order")

    model = FakeModel(SCRIPTS, ubatch=1, before=fail)
    first, second = ask_together(open_engine(model), "a", "b")
    assert first.wait().text == "Hello, world"
    assert isinstance(second.wait().last.error, BackendError)


def test_an_unexpected_error_is_logged(open_engine: Open, caplog: pytest.LogCaptureFixture) -> None:
    def fail(model: FakeModel, step: Step) -> None:
        raise ZeroDivisionError("somewhere")

    with caplog.at_level(logging.ERROR):
        answer = ask(open_engine(FakeModel(SCRIPTS, before=fail))).wait()
    assert isinstance(answer.last.error, ZeroDivisionError)
    assert [r.exc_info[0] for r in caplog.records if r.exc_info] == [ZeroDivisionError]


def test_logits_that_are_no_numbers_end_their_own_sequence_only(open_engine: Open) -> None:
    class Broken(FakeModel):
        def _logits(self, seq: int, length: int) -> np.ndarray:
            logits = super()._logits(seq, length)
            return logits * np.nan if seq == 0 and len(self.texts[0]) == 3 else logits

    first, second = ask_together(open_engine(Broken(SCRIPTS)), "a", "b")
    assert isinstance(first.wait().last.error, BackendError)
    assert first.text == "He"
    assert second.wait().text == "123456789"


def test_a_token_that_the_tokenizer_does_not_have(open_engine: Open) -> None:
    """A model may have more logits than its vocabulary has tokens."""

    class Wide(FakeModel):
        n_vocab = END + 10

        def _logits(self, seq: int, length: int) -> np.ndarray:
            logits = super()._logits(seq, length)
            if self.texts[seq] == list(b"bad"):
                logits[END + 5] = 100
            return logits

    engine = open_engine(Wide(SCRIPTS, n_vocab=END + 10))
    first, second = ask_together(engine, "bad", "b")
    assert isinstance(first.wait().last.error, OptionError)
    assert second.wait().text == "123456789"


@pytest.mark.parametrize("kind", ["token", "done"])
def test_a_receiver_that_fails_ends_only_its_own_request(
    open_engine: Open, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    failed = threading.Event()

    class Broken(Answer):
        def __call__(self, event: Event) -> None:
            if event.kind == kind:
                failed.set()
                raise RuntimeError("the receiver is gone")

    model = FakeModel(SCRIPTS)
    engine = open_engine(model)
    _, second = engine.call(lambda _: [ask(engine, "b", Broken()), ask(engine, "a")])
    assert second.wait().text == "Hello, world"
    assert failed.is_set()
    assert 0 in model.freed
    assert f"failed on a {kind} event" in caplog.text


def test_a_cancel_that_came_too_late_is_over_with_its_step() -> None:
    """What the model does by itself after the step belongs to no request that was cancelled."""
    g, model = gate()
    assert g.enter(frozenset((1,)))
    g.cancel(1)
    g.leave()
    assert not model.cancelled.is_set()
    assert not g.must_end


def test_a_stop_holds_behind_the_step_that_it_ended() -> None:
    g, model = gate()
    assert g.enter(frozenset((1,)))
    g.stop()
    g.leave()
    assert model.cancelled.is_set()
    assert g.must_end
