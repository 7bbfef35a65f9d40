"""The engine on a scripted model: calls, Ctrl-C, loading and closing."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from hetrun.client.events import Event
from hetrun.engine.engine import Engine
from hetrun.engine.inbox import Job
from hetrun.engine.loaded_model import LoadedModel
from hetrun.errors import EngineStopped, ModelFileError
from hetrun.executor.interface import Model
from tests.engine.asking import SCRIPTS, Answer, Open, ask, ask_together
from tests.engine.fakemodel import FakeModel, loaded


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

    def again(_: LoadedModel) -> None:
        if not answer.over.is_set():
            engine._put(Job(0, again))

    engine.call(again)
    assert ask(engine, "a", answer).wait().text == "Hello, world"


def test_ctrl_c_in_a_call_ends_what_it_computes(open_engine: Open, ctrl_c: Callable[[], None]) -> None:
    model, ended = FakeModel(SCRIPTS), threading.Event()
    engine = open_engine(model)

    def work(_: LoadedModel) -> None:
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

    def first(_: LoadedModel) -> None:
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


def test_an_error_while_loading_is_raised_where_the_engine_is_opened() -> None:
    def load() -> LoadedModel:
        raise ModelFileError("x.gguf", "it is not a model")

    before = threading.active_count()
    with pytest.raises(ModelFileError, match=r"x\.gguf: it is not a model"):
        Engine(load)
    assert threading.active_count() <= before + 1


def test_ctrl_c_while_it_loads_leaves_nothing_behind(ctrl_c: Callable[[], None]) -> None:
    model, release = FakeModel(SCRIPTS), threading.Event()

    def load() -> LoadedModel:
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

    def closing(_: LoadedModel) -> None:
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
    assert errors == ["the model was closed before this request was processed"]


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
from hetrun.engine.engine import Engine
from hetrun.client.events import GenerateRequest
from hetrun.client.sampling_params import SamplingParams
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
