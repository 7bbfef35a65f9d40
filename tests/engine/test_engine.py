"""The engine on a scripted model: streaming, stopping, cancelling, errors, closing."""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetrun.engine import Engine
from hetrun.errors import BackendError, ContextFull, EngineStopped, ModelFileError, OptionError
from hetrun.events import Event, GenerateRequest
from hetrun.executor import Step
from hetrun.loop import Gate, Job, Loaded
from hetrun.model import MAX_SEQUENCES, Model
from hetrun.params import SamplingParams
from tests.engine.fakemodel import END, FakeModel, loaded

Open = Callable[..., Engine]
SCRIPTS = {"a": b"Hello, world", "b": b"123456789", "l": b"x" * 1000, "u": "Grüße".encode()}


@pytest.fixture
def open_engine() -> Iterator[Open]:
    """Opens engines and closes them behind the test."""
    engines: list[Engine] = []

    def open_engine(model: FakeModel | None = None, **options: Any) -> Engine:  # noqa: ANN401
        engines.append(Engine(lambda: loaded(model or FakeModel(SCRIPTS), **options)))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@dataclass
class Answer:
    """What a request gave so far."""

    events: list[Event] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    id: int = 0

    def __call__(self, event: Event) -> None:
        assert not self.over.is_set(), "an event behind the last one"
        self.events.append(event)
        if event.kind != "token":
            self.over.set()

    def wait(self) -> Answer:
        assert self.over.wait(30), f"no end after {self.events}"
        return self

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events)

    @property
    def tokens(self) -> list[int | None]:
        return [e.token for e in self.events[:-1]]

    @property
    def last(self) -> Event:
        return self.events[-1]


def ask(engine: Engine, prompt: str = "a", answer: Answer | None = None, **params: Any) -> Answer:  # noqa: ANN401
    answer = answer or Answer()
    answer.id = engine.submit(GenerateRequest(SamplingParams(**params), text=prompt), answer)
    return answer


def ask_together(engine: Engine, *prompts: str, **params: Any) -> list[Answer]:  # noqa: ANN401
    """Requests that are all in the inbox before the engine looks into it."""
    return engine.call(lambda _: [ask(engine, prompt, **params) for prompt in prompts])


# --- answers


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
    assert isinstance(answer.last.error, OptionError)
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


# --- several at once


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


# --- cancelling


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
    gate.model = model
    return gate, model


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


# --- errors


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


def test_an_error_that_nobody_raised_on_purpose_is_logged(
    open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(model: FakeModel, step: Step) -> None:
        raise ZeroDivisionError("somewhere")

    with caplog.at_level(logging.ERROR):
        answer = ask(open_engine(FakeModel(SCRIPTS, before=fail))).wait()
    assert isinstance(answer.last.error, ZeroDivisionError)
    assert [r.exc_info[0] for r in caplog.records if r.exc_info] == [ZeroDivisionError]


def test_logits_that_are_no_numbers_end_their_own_sequence_only(open_engine: Open) -> None:
    class Broken(FakeModel):
        def _logits(self, seq: int) -> np.ndarray:
            logits = super()._logits(seq)
            return logits * np.nan if seq == 0 and len(self.texts[0]) == 3 else logits

    first, second = ask_together(open_engine(Broken(SCRIPTS)), "a", "b")
    assert isinstance(first.wait().last.error, BackendError)
    assert first.text == "He"
    assert second.wait().text == "123456789"


def test_a_token_that_the_tokenizer_does_not_have(open_engine: Open) -> None:
    """A model may have more logits than its vocabulary has tokens."""

    class Wide(FakeModel):
        n_vocab = END + 10

        def _logits(self, seq: int) -> np.ndarray:
            logits = super()._logits(seq)
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


# --- calls


def test_a_call_runs_on_the_engine_thread_and_hands_its_result_or_error_on(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS)
    engine = open_engine(model)
    assert engine.call(lambda it: (threading.get_ident(), it.model)) == (engine.thread_id, model)
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda _: 1 // 0)
    assert engine.call(lambda _: engine.call(lambda it: it.model.n_vocab)) == 257
    ask(engine).wait()
    assert model.threads == {engine.thread_id}
    assert engine.thread_id != threading.get_ident()


def test_calls_without_end_do_not_keep_answers_from_running(open_engine: Open) -> None:
    engine = open_engine()
    answer = Answer()

    def again(_: Loaded) -> None:
        if not answer.over.is_set():
            engine._put(Job(0, again))

    engine.call(again)
    assert ask(engine, "a", answer).wait().text == "Hello, world"


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Presses Ctrl-C, from another thread: the main thread gets one KeyboardInterrupt.

    A lock that is about to wait when the signal comes does not notice it, so it is pressed until it works.
    """
    raised = threading.Event()

    def handler(number: int, frame: object) -> None:
        if not raised.is_set():
            raised.set()
            raise KeyboardInterrupt

    def press() -> None:
        while not raised.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            raised.wait(0.01)

    before = signal.signal(signal.SIGINT, handler)
    yield press
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_a_call_ends_what_it_computes(open_engine: Open, ctrl_c: Callable[[], None]) -> None:
    model, ended = FakeModel(SCRIPTS), threading.Event()
    engine = open_engine(model)

    def work(_: Loaded) -> None:
        ctrl_c()
        assert model.cancelled.wait(30)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        engine.call(work)
    assert ended.wait(30)
    assert engine.call(lambda _: model.cancelled.is_set()) is False, "the next call is not cancelled"
    assert ask(engine).wait().text == "Hello, world"


def test_ctrl_c_in_a_call_that_waits_ends_no_other_call_and_it_never_runs(
    open_engine: Open, ctrl_c: Callable[[], None]
) -> None:
    model, entered, release = FakeModel(SCRIPTS), threading.Event(), threading.Event()
    engine = open_engine(model)
    ran: list[str] = []

    def first(_: Loaded) -> None:
        entered.set()
        assert release.wait(30)
        ran.append("first")

    def watch() -> None:
        while engine._inbox.empty():
            release.wait(0.001)
        ctrl_c()

    def call() -> None:
        watcher.start()
        engine.call(lambda _: ran.append("second"))

    other, watcher = threading.Thread(target=engine.call, args=(first,)), threading.Thread(target=watch)
    other.start()
    assert entered.wait(30)
    with pytest.raises(KeyboardInterrupt):
        call()
    assert not model.cancelled.is_set()
    release.set()
    other.join()
    watcher.join()
    assert engine.call(lambda _: list(ran)) == ["first"]


# --- loading and closing


def test_what_goes_wrong_while_loading_is_raised_by_whoever_opens() -> None:
    def load() -> Loaded:
        raise ModelFileError("x.gguf", "it is not a model")

    before = threading.active_count()
    with pytest.raises(ModelFileError, match=r"x\.gguf: it is not a model"):
        Engine(load)
    assert threading.active_count() <= before + 1


def test_ctrl_c_while_it_loads_leaves_nothing_behind(ctrl_c: Callable[[], None]) -> None:
    model, release = FakeModel(SCRIPTS), threading.Event()

    def load() -> Loaded:
        ctrl_c()
        assert release.wait(30)
        return loaded(model)

    with pytest.raises(KeyboardInterrupt):
        Engine(load)
    release.set()
    assert model.closed.wait(30)


def test_closing_ends_what_runs_and_what_waits_with_an_error(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS, before=FakeModel.block)
    engine = open_engine(model)
    running = ask(engine, "a")
    assert model.inside.wait(30)
    waiting = ask(engine, "b")
    engine.close()
    for answer in (running, waiting):
        assert [e.kind for e in answer.events] == ["error"]
        assert isinstance(answer.last.error, EngineStopped)
        assert "the model was closed before the answer was complete" in str(answer.last.error)
    assert model.closed.is_set()
    engine.close()


def test_closing_from_an_event(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS)
    engine = open_engine(model)

    class Closing(Answer):
        def __call__(self, event: Event) -> None:
            super().__call__(event)
            if event.kind == "token":
                engine.close()

    answer = ask(engine, "a", Closing()).wait()
    assert [e.kind for e in answer.events] == ["token", "error"]
    assert model.closed.wait(30)


def test_calls_that_wait_at_a_close_are_answered(open_engine: Open) -> None:
    engine, entered, errors = open_engine(), threading.Event(), []

    def closing(_: Loaded) -> None:
        entered.set()
        while engine._inbox.empty():
            threading.Event().wait(0.001)
        engine.close()

    def second() -> None:
        assert entered.wait(30)
        with pytest.raises(EngineStopped) as caught:
            engine.call(lambda _: None)
        errors.append(str(caught.value))

    thread = threading.Thread(target=second)
    thread.start()
    engine.call(closing)
    thread.join(30)
    assert errors == ["the model was closed before it came to this"]


def test_nothing_is_taken_behind_a_close(open_engine: Open) -> None:
    engine = open_engine()
    engine.close()
    with pytest.raises(EngineStopped, match=r"the model was closed; open it again with LLM"):
        ask(engine)
    with pytest.raises(EngineStopped):
        engine.call(lambda _: None)
    engine.cancel(1)


def test_an_engine_that_is_closed_does_not_keep_the_model() -> None:
    model = FakeModel(SCRIPTS)
    kept = weakref.ref(model)
    made = [loaded(model)]
    engine = Engine(made.pop)
    ask(engine).wait()
    engine.close()
    del model
    gc.collect()
    assert kept() is None
    assert engine.thread_id is not None


def test_an_engine_that_breaks_answers_everybody(open_engine: Open, caplog: pytest.LogCaptureFixture) -> None:
    breaking = threading.Event()
    errors: list[str] = []

    class Broken(FakeModel):
        def free(self, seq: int) -> None:
            breaking.set()
            while engine._inbox.empty():
                threading.Event().wait(0.001)
            raise RuntimeError("the books do not balance")

    def call() -> None:
        assert breaking.wait(30)
        with pytest.raises(EngineStopped) as caught:
            engine.call(lambda _: None)
        errors.append(str(caught.value))

    engine = open_engine(Broken(SCRIPTS))
    caller = threading.Thread(target=call)
    caller.start()
    first, second = ask_together(engine, "b", "l")
    said = "the engine failed (RuntimeError: the books do not balance); please report it"
    assert str(first.wait().last.error) == str(second.wait().last.error) == said
    caller.join(30)
    assert errors == [said]
    with pytest.raises(EngineStopped):
        ask(engine)
    assert "the engine failed" in caplog.text


AT_EXIT = """
from hetrun.engine import Engine
from hetrun.events import GenerateRequest
from hetrun.params import SamplingParams
from tests.engine.fakemodel import FakeModel, loaded
model = FakeModel({"a": b"x"}, before=FakeModel.block)
engine = Engine(lambda: loaded(model))
request = GenerateRequest(SamplingParams(), text="a")
engine.submit(request, lambda e: print(e.kind, e.error, model.closed.is_set()))
model.inside.wait(30)
"""


def test_a_program_may_end_while_the_model_computes() -> None:
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], cwd=root, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "error the model was closed before the answer was complete False\n"


def test_the_fake_model_is_a_model() -> None:
    model: Model = FakeModel()
    assert model.n_vocab == 257
