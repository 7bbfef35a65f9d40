"""The budget changes while requests run: between two steps, cached prompts first, and no request is lost."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, strategies as st

from hetrun.client.events import Streaming
from hetrun.engine.engine import Engine
from hetrun.engine.inbox import Job
from hetrun.engine.loaded_model import LoadedModel
from hetrun.errors import BudgetError, EngineStopped
from hetrun.executor.interface import look, set_ram
from hetrun.executor.steps import Step
from hetrun.memory.kv.prefix_cache import LEAST, Prefixes
from tests.engine.asking import SCRIPTS, Answer, Open, ask, ask_together
from tests.engine.fakemodel import FakeModel, loaded as fake

FROM_DISK = Streaming(7, 1 << 20, 2e9, 0.5, 1e5, 300, 100, 1000, 500)
LONG = "l" * (LEAST + 4)  # prompts that are worth keeping


def keeping(model: FakeModel) -> LoadedModel:
    """With a prefix cache."""
    found = fake(model)
    found.prefixes = Prefixes(model)
    return found


def change(engine: Engine, nbytes: int) -> int | None:
    """What the budget is then."""

    def work(loaded: LoadedModel) -> int | None:
        set_ram(loaded.model, nbytes, loaded.prefixes)
        assert isinstance(loaded.model, FakeModel)
        return loaded.model.ram

    return engine.call(work)


def cached(engine: Engine) -> list[str]:
    """The prompts that are kept, by their first letters, the last used first."""

    def work(loaded: LoadedModel) -> list[str]:
        assert loaded.prefixes
        return [chr(entry.tokens[0]) for entry in loaded.prefixes.entries()]

    return engine.call(work)


def test_cached_prompts_go_as_far_as_they_have_to_the_oldest_first() -> None:
    model = FakeModel(context=40)
    engine = Engine(lambda: keeping(model))
    try:
        for letter in "xyz":
            ask(engine, letter * 20).wait()
        assert (cached(engine), model.held) == (["z", "y", "x"], 60)
        assert change(engine, 60) == 60
        assert cached(engine) == ["z", "y", "x"]
        assert change(engine, 59) == 59
        assert (cached(engine), model.held) == (["z", "y"], 40)
        assert change(engine, 1000) == 1000
        assert cached(engine) == ["z", "y"]
    finally:
        engine.close()


def test_what_can_never_be_costs_no_cached_prompt() -> None:
    model = FakeModel(context=40)
    engine = Engine(lambda: keeping(model))
    try:
        for letter in "xyz":
            ask(engine, letter * 20).wait()
        with pytest.raises(BudgetError):
            change(engine, 39)
        assert cached(engine) == [], "no one knew how much it would take"
        ask(engine, "x" * 20).wait()
        model.from_disk = FROM_DISK
        with pytest.raises(BudgetError):
            change(engine, 39)
        assert cached(engine) == ["x"]
        assert change(engine, FROM_DISK.least) == FROM_DISK.least
    finally:
        engine.close()


def test_a_budget_that_what_runs_does_not_fit_into_is_refused_and_nothing_is_lost() -> None:
    entered, release = threading.Event(), threading.Event()

    def wait(model: FakeModel, step: Step) -> None:
        entered.set()
        assert release.wait(30)

    model = FakeModel(SCRIPTS, context=80, before=wait)
    engine = Engine(lambda: keeping(model))
    said: list[BaseException] = []

    def shrink() -> None:
        try:
            change(engine, 79)
        except BaseException as error:
            said.append(error)

    try:
        running = ask(engine, LONG, max_tokens=30)
        assert entered.wait(30)
        other = threading.Thread(target=shrink)  # it comes while a step runs, and waits for its end
        other.start()
        release.set()
        other.join(30)
        (error,) = said
        assert isinstance(error, BudgetError)
        assert str(error) == "79 bytes are too little: 80 would do"
        assert running.wait().text == "x" * 30
        assert model.ram is None
        assert model.threads == {engine.thread_id}
    finally:
        engine.close()


def test_answers_go_on_in_a_smaller_budget_and_give_memory_to_each_other(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS, context=64)
    engine = open_engine(model)

    def begin(loaded: LoadedModel) -> list[Answer]:
        answers = [ask(engine, "l" * 8, max_tokens=40) for _ in range(4)]
        set_ram(loaded.model, 64, loaded.prefixes)
        return answers

    answers = engine.call(begin)
    assert [answer.wait().text for answer in answers] == ["x" * 40] * 4
    assert max(len(step) for step in model.steps) < 4, "all four never had room together"


@given(st.dictionaries(st.integers(1, 30), st.integers(30, 200), max_size=10))
def test_answers_are_the_same_however_the_budget_changes(budgets: dict[int, int]) -> None:
    """Each budget begins after its number of steps. What a sequence gives up is computed again."""

    def at_its_step(model: FakeModel, step: Step) -> None:
        if nbytes := budgets.get(len(model.steps)):
            engine._put(Job(0, lambda loaded: set_ram(loaded.model, nbytes, loaded.prefixes)))

    # The fake model does not tell an answer that is computed again from a prompt: every letter is the same.
    scripts = {letter: letter.upper().encode() * 50 for letter in "abcd"}
    model = FakeModel(scripts, context=40, before=at_its_step)
    engine = Engine(lambda: keeping(model))
    try:
        answers = ask_together(engine, "a" * 9, "b", "c" * (LEAST + 4), "dada", max_tokens=12)
        texts = [answer.wait().text for answer in answers]
    finally:
        engine.close()
    assert texts == [letter * 12 for letter in "ABCD"]
    assert model.ram in (None, *budgets.values())


def test_more_places_or_fewer_are_followed_by_who_may_wait(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS, max_sequences=4)
    engine = open_engine(model, most_waiting=1)

    def refused() -> list[bool]:
        return [answer.wait().last.kind == "error" for answer in ask_together(engine, *"abababab")]

    assert refused() == [False] * 5 + [True] * 3

    def fewer(loaded: LoadedModel) -> None:
        loaded.model.max_sequences = 2

    engine.call(fewer)
    assert refused() == [False] * 3 + [True] * 5


def test_what_the_disk_is_like_is_seen_from_the_beginning(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS)
    model.from_disk = FROM_DISK
    engine = open_engine(model)
    assert engine.call(lambda _: engine.streaming) == FROM_DISK


def test_what_the_disk_is_like_is_seen_behind_each_step(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS)
    engine = open_engine(model)
    ask(engine).wait()
    assert engine.streaming is None

    def from_disk(_: LoadedModel) -> None:
        model.from_disk = FROM_DISK

    engine.call(from_disk)
    assert engine.call(lambda _: engine.streaming) is None
    assert engine.call(lambda loaded: look(loaded.model).streaming) == FROM_DISK
    ask(engine).wait()
    assert engine.call(lambda _: engine.streaming) == FROM_DISK
    engine.close()
    assert engine.streaming is None
    with pytest.raises(EngineStopped):
        change(engine, 1000)
