"""Questions and the engine's thread: what is asked while passes run, and what the engine says of itself."""

from __future__ import annotations

import threading
import time

import pytest

from hetrun.engine.batching import NOTICE_S
from hetrun.engine.engine import Engine
from hetrun.engine.loaded_model import LoadedModel
from hetrun.engine.query_handlers import MOST_PART, PART, parts, state
from hetrun.errors import EngineStopped, OptionError
from tests.engine.asking import SCRIPTS, Answer, Open, ask
from tests.engine.fakemodel import FakeModel
from tests.engine.test_standing_aside import LONG, Aside, at


def test_a_question_does_not_wait_for_a_long_pass(open_engine: Open) -> None:
    seen: list[str] = []
    model = Aside()
    engine: Engine = open_engine(model)
    asked: list[threading.Thread] = []

    def look(name: str, aside: bool) -> None:
        def work(loaded: LoadedModel) -> None:
            seen.append(f"{name} {'inside' if 'end' not in model.log else 'behind'}")

        asked.append(threading.Thread(target=lambda: engine.call(work, aside=aside)))
        asked[-1].start()
        while engine._inbox.qsize() < len(asked):
            asked[-1].join(0.001)

    def both() -> None:
        look("job", aside=False)
        look("aside", aside=True)
        time.sleep(NOTICE_S)  # how often a pass in which nothing waits checks for new requests

    model.within = at(1, both)
    ask(engine, "b" * LONG, Answer()).wait()
    for thread in asked:
        thread.join(10)
    assert seen == ["aside inside", "job behind"]


def test_what_runs_and_what_waits_is_seen_from_outside(open_engine: Open) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def pause(model: FakeModel, step: object) -> None:
        inside.set()
        assert go_on.wait(30)

    engine: Engine = open_engine(FakeModel(SCRIPTS, before=pause, max_sequences=1))
    first = ask(engine, "aaaa", max_tokens=5)
    assert inside.wait(30)
    second = ask(engine, "b")
    found = state(engine.held)  # at once: the engine's thread is in a step
    assert [(slot.id, slot.state, slot.prompt_tokens) for slot in found.slots] == [(first.id, "prompt", 4)]
    assert (found.places, found.context) == (1, 64)
    go_on.set()
    first.wait()
    second.wait()
    counts = state(engine.held).counts
    assert counts.requests == {"length": 1, "stop": 1}
    assert (counts.prompt_tokens, counts.answer_tokens) == (5, 5 + 9)
    assert counts.begun == 2
    assert counts.first_token_s > 0


def test_refusals_and_cancels_are_counted(open_engine: Open) -> None:
    engine: Engine = open_engine(FakeModel(SCRIPTS, before=FakeModel.block))
    answer = ask(engine, "l")
    engine.cancel(answer.id)
    answer.wait()
    ask(engine, "").wait()
    assert state(engine.held).counts.requests == {"cancelled": 1, "error": 1}


def test_an_engine_that_is_closed_says_so(open_engine: Open) -> None:
    engine: Engine = open_engine()
    engine.close()
    with pytest.raises(EngineStopped, match="open it again"):
        _ = engine.held


def test_texts_are_cut_between_words() -> None:
    text = "ab cd " * PART
    found = list(parts(text, cuts_at_spaces=True))
    assert "".join(found) == text
    assert len(found) > 1
    assert all(part.startswith(" ") for part in found[1:])
    assert max(map(len, found)) <= PART + 3
    assert list(parts("a b", cuts_at_spaces=True)) == ["a b"]
    assert list(parts("", cuts_at_spaces=True)) == [""]
    assert list(parts(text[:MOST_PART], cuts_at_spaces=False)) == [text[:MOST_PART]]
    with pytest.raises(OptionError, match=f"{MOST_PART + 1} characters"):
        list(parts("x" * (MOST_PART + 1), cuts_at_spaces=True))
