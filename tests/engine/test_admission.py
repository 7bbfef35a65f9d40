"""Who is let in and who is not, by an engine that counts and measures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from hetrun.client.events import GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.engine.admission_gate import gives_way
from hetrun.engine.engine import Engine
from hetrun.engine.request import ActiveRequest
from hetrun.errors import DeadlineExceeded, Overloaded
from hetrun.executor.steps import Step
from tests.engine.asking import SCRIPTS, Answer, Open, ask, ask_together
from tests.engine.fakemodel import FakeModel
from tests.support.tiers import first


def refused(answer: Answer) -> Overloaded | None:
    error = answer.wait().last.error
    assert error is None or isinstance(error, Overloaded)
    return error


def ask_until(engine: Engine, deadline_s: float, prompt: str = "a", **params: object) -> Answer:
    answer = Answer()
    params_of = SamplingParams.from_mapping(params)
    answer.id = engine.submit(GenerateRequest(params_of, text=prompt, deadline_s=deadline_s), answer)
    return answer


def ask_as(engine: Engine, client: str, priority: int) -> Answer:
    answer = Answer()
    request = GenerateRequest(SamplingParams(), text="a", client=client, priority=priority)
    answer.id = engine.submit(request, answer)
    return answer


def slow_planner(model: FakeModel, seconds_a_token: float) -> FakeModel:
    """Predicts, but is not slow."""
    model.predict = lambda chunks: seconds_a_token * sum(n for n, _ in chunks)  # type: ignore[method-assign]
    return model


def test_as_many_wait_as_may(open_engine: Open) -> None:
    engine = open_engine(FakeModel(SCRIPTS, max_sequences=2), most_waiting=3)
    errors = [refused(answer) for answer in ask_together(engine, *"abababab")]
    assert [error is None for error in errors] == [True] * 5 + [False] * 3
    assert all(error and (error.retry_after_s or 0) >= 1 for error in errors[5:])
    assert ask(engine).wait().text == "Hello, world"  # there is room again


def test_a_flood_of_one_client_does_not_keep_others_out(open_engine: Open) -> None:
    engine = open_engine(FakeModel(SCRIPTS, max_sequences=1), most_waiting=4)

    def flood(_: object) -> list[Answer]:
        asked = [("ann", 0)] * 6 + [("bob", 0)] * 2 + [("ann", 0), ("bob", 0), ("ann", -1)]
        return [ask_as(engine, client, priority) for client, priority in asked]

    accepted = [refused(answer) is None for answer in engine.call(flood)]
    # One has the place. Of the four that wait, two are bob's in the end, and the urgent one is there.
    assert accepted == [True, True, False, False, False, False, True, True, False, False, True]


def asking(client: str, priority: int, arrived: float) -> ActiveRequest:
    request = GenerateRequest(SamplingParams(), text="x", client=client, priority=priority)
    return ActiveRequest(0, request, lambda event: None, arrived)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1)), max_size=8), st.sampled_from("abc"))
def test_who_gives_way(waiting: list[tuple[str, int]], client: str) -> None:
    queue = [asking(c, p, i) for i, (c, p) in enumerate(waiting)]
    new = asking(client, 0, len(queue))
    last = gives_way(new, queue)
    assert last.priority == max(w.priority for w in (*queue, new))
    many = Counter(w.client for w in (*queue, new))
    alike = [w for w in (*queue, new) if w.priority == last.priority]
    assert many[last.client] == max(many[w.client] for w in alike)
    if last is not new and not last.priority:
        assert many[last.client] > many[client]


@pytest.mark.parametrize("requests", first([400, 1000]))
def test_in_process_no_request_is_refused(open_engine: Open, requests: int) -> None:
    engine = open_engine(FakeModel(SCRIPTS, max_sequences=2))
    answers = ask_together(engine, *["a"] * requests)
    assert all(refused(answer) is None for answer in answers)


def test_who_leaves_makes_room(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS, max_sequences=1, context=2048)
    engine = open_engine(model, most_waiting=1)
    long, waits, late = ask_together(engine, "l", "a", "a")
    assert refused(late)
    engine.cancel(waits.id)
    waits.wait()
    last = ask(engine)
    engine.cancel(long.id)
    assert refused(last) is None


@pytest.fixture
def held() -> Callable[[FakeModel, Step], None]:
    """Keeps the first step in the model until it is cancelled; the others run."""

    def first(model: FakeModel, step: Step) -> None:
        if len(model.steps) == 1:
            model.block(step)

    return first


def test_a_deadline_that_will_be_missed_is_refused_before_it_waits(open_engine: Open) -> None:
    model = slow_planner(FakeModel(SCRIPTS, max_sequences=1, context=4096), 1.0)
    engine = open_engine(model)

    def together(_: object) -> list[Answer]:
        return [ask(engine, "l" * 300, max_tokens=5), ask_until(engine, 100.0), ask_until(engine, 1000.0)]

    first, hopeless, patient = engine.call(together)
    error = refused(hopeless)
    assert error is not None
    assert "wanted within 100 s" in str(error)
    assert 1 <= (error.retry_after_s or 0) <= 60
    assert refused(first) is None
    assert refused(patient) is None
    # Alone it is tried, whatever is predicted: that is how a wrong prediction mends.
    assert refused(ask_until(engine, 5.0, "a" * 50, max_tokens=2)) is None


def test_a_deadline_that_passes(open_engine: Open, held: Callable[[FakeModel, Step], None]) -> None:
    model = FakeModel(SCRIPTS, max_sequences=1, before=held)
    engine = open_engine(model)
    first = ask(engine, "l")
    assert model.inside.wait(30)
    late = ask_until(engine, 1e-6)
    engine.cancel(first.id)
    assert isinstance(late.wait().last.error, DeadlineExceeded)
    assert [event.kind for event in late.events] == ["error"]
