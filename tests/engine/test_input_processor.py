"""What is done with a request before the model takes it: on other threads, and without stopping anybody."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from hetrun.client.events import Event, GenerateRequest, Message
from hetrun.client.sampling_params import SamplingParams, Structure
from hetrun.engine.engine import Engine
from hetrun.engine.input_processor import Renderer
from hetrun.errors import ContextFull, EngineStopped, OptionError, TemplateError
from hetrun.sampling.grammar.token_mask import Grammars
from hetrun.sampling.interface import Constraint
from hetrun.text.tokenizer import Tokenizer
from tests.engine.asking import SCRIPTS, Answer, ask
from tests.engine.fakemodel import Bytes, FakeModel, loaded


def engine_with(render: Renderer) -> Engine:
    return Engine(lambda: loaded(FakeModel(SCRIPTS), render=render))


def ask_with_messages(engine: Engine, content: str, **options: object) -> Answer:
    answer = Answer()
    messages = ({"role": "user", "content": content},)
    request = GenerateRequest(SamplingParams(), messages=messages, template_options=options)
    answer.id = engine.submit(request, answer)
    return answer


def test_a_template_gets_its_options_and_another_thread() -> None:
    heard: list[tuple[Mapping[str, object], int]] = []

    def render(messages: tuple[Message, ...], options: Mapping[str, object]) -> str:
        heard.append((options, threading.get_ident()))
        return "b"

    engine = engine_with(render)
    try:
        assert ask_with_messages(engine, "?", enable_thinking=False).wait().text == "123456789"
        assert heard[0][0] == {"enable_thinking": False}
        assert heard[0][1] != engine.thread_id
    finally:
        engine.close()


def test_a_slow_template_stops_no_other_request_and_can_be_cancelled() -> None:
    inside, go = threading.Event(), threading.Event()

    def render(messages: tuple[Message, ...], options: Mapping[str, object]) -> str:
        inside.set()
        assert go.wait(30)
        return "a"

    engine = engine_with(render)
    try:
        slow, doomed = ask_with_messages(engine, "slow"), ask_with_messages(engine, "doomed")
        assert inside.wait(30)
        assert ask(engine, "b").wait().text == "123456789"
        engine.cancel(doomed.id)
        assert doomed.wait().last.finish_reason == "cancelled"
        assert not slow.events
        go.set()
        assert slow.wait().text == "Hello, world"
        assert len(doomed.events) == 1
    finally:
        go.set()
        engine.close()


def test_messages_do_not_wait_for_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    go, compiled = threading.Event(), []

    def constraint(self: Grammars, structure: Structure, begun: str = "") -> Constraint:
        compiled.append(structure.text)
        assert go.wait(30)
        raise OptionError("no such grammar")

    monkeypatch.setattr(Grammars, "constraint", constraint)
    engine = engine_with(lambda messages, options: "b")
    try:
        asked = [ask(engine, "a", regex=str(i)) for i in range(8)]
        assert ask_with_messages(engine, "?").wait().text == "123456789"
        for answer in asked[2:]:
            engine.cancel(answer.id)
            answer.wait()
        go.set()
        for answer in asked[:2]:
            assert isinstance(answer.wait().last.error, OptionError)
        assert compiled == ["0", "1"]  # who has hung up costs nothing any more
    finally:
        go.set()
        engine.close()


def test_a_long_text_is_not_tokenised_in_vain() -> None:
    engine = engine_with(lambda messages, options: "b")
    try:
        error = ask(engine, "b" * 10_000).wait().last.error
        assert isinstance(error, ContextFull)
        assert str(error) == "the prompt has 10000 characters, far more than 64 tokens can hold; shorten it"
    finally:
        engine.close()


def test_a_template_that_fails_fails_its_request_alone() -> None:
    def render(messages: tuple[Message, ...], options: Mapping[str, object]) -> str:
        raise TemplateError("line 1: no")

    engine = engine_with(render)
    try:
        assert isinstance(ask_with_messages(engine, "?").wait().last.error, TemplateError)
        assert ask(engine, "b").wait().text == "123456789"
    finally:
        engine.close()


def test_closing_answers_those_that_are_being_prepared() -> None:
    go = threading.Event()

    def render(messages: tuple[Message, ...], options: Mapping[str, object]) -> str:
        assert go.wait(30)
        return "a"

    engine = engine_with(render)
    waiting = ask_with_messages(engine, "?")
    engine.close()
    assert isinstance(waiting.wait().last.error, EngineStopped)
    go.set()


def test_only_the_engine_thread_asks_the_vocabulary() -> None:
    asked: set[int] = set()

    class Watched(Bytes):
        def is_control(self, token: int) -> bool:
            asked.add(threading.get_ident())
            return super().is_control(token)

        def is_end(self, token: int) -> bool:
            asked.add(threading.get_ident())
            return super().is_end(token)

    watched = loaded(FakeModel(SCRIPTS))
    watched.tokenizer = Tokenizer(Watched())
    engine = Engine(lambda: watched)
    try:
        assert ask(engine, "b", regex="[0-9]{3}").wait().text == "123"
        assert asked == {engine.thread_id}
    finally:
        engine.close()


def test_a_grammar_needs_a_tokenizer() -> None:
    engine = Engine(lambda: loaded(FakeModel(SCRIPTS), tokenizer=False))
    try:
        answer = Answer()
        engine.submit(GenerateRequest(SamplingParams(regex="a+"), tokens=(97,)), answer)
        assert isinstance(answer.wait().last.error, OptionError)
    finally:
        engine.close()


def test_tools_reach_the_template_and_an_open_thought_is_said_once() -> None:
    tools = ({"type": "function", "function": {"name": "now"}},)
    heard: list[Mapping[str, object]] = []

    def render(messages: tuple[Message, ...], options: Mapping[str, object]) -> str:
        heard.append(options)
        return f"b<think>\n{messages[0]['content']}"

    engine = engine_with(render)
    try:
        for content, opened in (("", "<think>"), ("b", "")):
            answer = Answer()
            messages = ({"role": "user", "content": content},)
            params = SamplingParams(max_tokens=3)
            engine.submit(GenerateRequest(params, messages=messages, tools=tools), answer)
            said = [event.opened for event in answer.wait().events]
            assert said == [opened, *[""] * (len(said) - 1)]
        assert heard == [{"tools": tools}] * 2
    finally:
        engine.close()


@pytest.mark.parametrize(("prompt", "text"), [("t<think>\n", "hm</think>\ncall"), ("t", "call")])
def test_an_open_thought_may_end_before_forced_calls_begin(prompt: str, text: str) -> None:
    script = {"t": b"hm</think>\ncall"}
    engine = Engine(lambda: loaded(FakeModel(script), render=lambda messages, options: prompt))
    try:
        answer = Answer()
        messages = ({"role": "user", "content": ""},)
        engine.submit(GenerateRequest(SamplingParams(), messages=messages, parts='["call"]'), answer)
        assert answer.wait().text == text
    finally:
        engine.close()


def test_the_input_is_let_go_once_a_request_has_its_place() -> None:
    engine = engine_with(lambda messages, options: "b")
    held: list[object] = []

    def on_event(event: Event) -> None:
        held.extend(r.prepared or r.preparing for r in engine.held.running)
        answer(event)

    try:
        answer = Answer()
        engine.submit(
            GenerateRequest(SamplingParams(), messages=({"role": "user", "content": "?"},)), on_event
        )
        assert answer.wait().text == "123456789"
        assert held
        assert not any(held)
    finally:
        engine.close()
