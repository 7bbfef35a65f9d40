"""What servers ask of a request besides its answer: progress, places and their files, probabilities."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetrun.api.local_model import LocalModel
from hetrun.client.events import Event, GenerateRequest
from hetrun.client.queries import SlotAction, StateQuery
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import FieldError, Overloaded, UserError
from tests.engine.asking import SCRIPTS, Answer, Open, ask
from tests.engine.fakemodel import FakeModel
from tests.models.cases import GQA
from tests.models.tiny import random_tokens
from tests.support.rig import model_file

PROMPT = tuple(random_tokens(60, seed=1))
FEW = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[LocalModel]:
    with LocalModel(model_file(GQA), ctx=128, backends=["reference"], precision="fast") as model:
        yield model


def submit(engine: Open, model: FakeModel, request: GenerateRequest) -> Answer:
    answer = Answer()
    engine(model).submit(request, answer)
    return answer.wait()


def last(llm: LocalModel, request: GenerateRequest) -> Event:
    return list(llm.stream_request(request))[-1]


# --- progress


def test_each_step_tells_how_far_the_prompt_is(open_engine: Open) -> None:
    model = FakeModel(SCRIPTS, ubatch=8)
    request = GenerateRequest(SamplingParams(max_tokens=1), text="a" * 20, progress=True)
    answer = submit(open_engine, model, request)
    told = [event.progress for event in answer.events if event.progress]
    assert [(p.computed, p.total, p.cached) for p in told] == [
        *((n, 20, 0) for n in (0, 8, 16, 20)),
    ]
    assert [p.seconds for p in told] == sorted(p.seconds for p in told)
    assert [event.kind for event in answer.events] == [*["prompt"] * 4, "token", "done"]


# --- how it ends


def test_the_stop_string_that_ended_an_answer_is_told(open_engine: Open) -> None:
    engine = open_engine()
    assert ask(engine, "a", stop=["world", "x"]).wait().last.stopped == "world"
    assert ask(engine, "a").wait().last.stopped == ""


def test_only_the_prompt_is_computed(llm: LocalModel) -> None:
    end = last(llm, GenerateRequest(FEW, tokens=PROMPT, prompt_only=True))
    assert (end.finish_reason, end.usage.completion_tokens) == ("length", 0)
    assert last(llm, GenerateRequest(FEW, tokens=(*PROMPT, 7))).usage.cached_tokens == len(PROMPT)


def test_a_fresh_request_computes_all_of_its_prompt(llm: LocalModel) -> None:
    for fresh, cached in ((False, 0), (True, 0), (False, len(PROMPT) - 1)):
        assert last(llm, GenerateRequest(FEW, tokens=PROMPT, fresh=fresh)).usage.cached_tokens == cached


def test_an_answer_may_be_limited_to_a_time_once_it_has_a_line(open_engine: Open) -> None:
    model = FakeModel({"a": b"one two\nthree four"})
    request = GenerateRequest(SamplingParams(), text="a", line_limit_s=0.0)
    answer = submit(open_engine, model, request)
    assert (answer.text, answer.last.finish_reason) == ("one two\n", "length")


# --- how it was drawn


def test_probabilities_of_the_draw_are_those_that_the_samplers_leave(llm: LocalModel) -> None:
    def scores(sampled: bool, **params: object) -> Event:
        asked = SamplingParams(max_tokens=1, seed=3, logprobs=4, **params)  # type: ignore[arg-type]
        request = GenerateRequest(asked, tokens=PROMPT, sampled_logprobs=sampled)
        return next(event for event in llm.stream_request(request) if event.logprob)

    params = {"temperature": 1.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0}
    own, drawn = scores(False, **params), scores(True, **params)
    assert own.logprob
    assert drawn.logprob
    assert own.token == drawn.token
    best = [math.exp(logprob) for _, logprob in own.logprob.top]
    shares = [math.exp(logprob) for _, logprob in drawn.logprob.top]
    assert [token for token, _ in drawn.logprob.top] == [token for token, _ in own.logprob.top[:3]]
    assert shares == pytest.approx([share / sum(best[:3]) for share in best[:3]], rel=1e-4)
    assert drawn.logprob.logprob == dict(drawn.logprob.top)[drawn.logprob.token]
    greedy = scores(True, temperature=0.0).logprob
    assert greedy
    assert (greedy.top, greedy.logprob) == (((greedy.token, 0.0),), 0.0)


# --- places


def test_a_request_waits_for_the_place_that_it_wants(open_engine: Open) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(model: FakeModel, step: object) -> None:
        inside.set()
        assert go_on.wait(30)

    engine = open_engine(FakeModel(SCRIPTS, before=hold))
    answers = [Answer() for _ in range(3)]
    for answer, slot in zip(answers, (2, 2, None), strict=True):
        engine.submit(GenerateRequest(SamplingParams(), text="a", slot=slot), answer)
    assert inside.wait(30)
    held = engine.held
    assert [r.slot for r in held.running][:1] == [2]
    go_on.set()
    assert [answer.wait().last.slot for answer in answers] == [2, 2, 0]
    far = Answer()
    engine.submit(GenerateRequest(SamplingParams(), text="a", slot=10**6), far)
    assert far.wait().last.slot == 0  # there is no such place: any will do


def test_a_slot_is_saved_restored_and_forgotten(llm: LocalModel, tmp_path: Path) -> None:
    path = tmp_path / "slot"
    first = last(llm, GenerateRequest(FEW, tokens=PROMPT, slot=1))
    assert first.slot == 1
    saved = llm.ask(SlotAction("save", 1, str(path)))
    assert (saved.tokens, saved.nbytes) == (len(PROMPT) + 4, path.stat().st_size)
    assert path.stat().st_mode & 0o777 == 0o600
    assert llm.ask(SlotAction("erase", 1)).tokens == len(PROMPT) + 4
    assert last(llm, GenerateRequest(FEW, tokens=PROMPT, slot=2)).usage.cached_tokens == 0
    assert llm.ask(SlotAction("erase", 2)).tokens == len(PROMPT) + 4
    restored = llm.ask(SlotAction("restore", 0, str(path)))
    assert restored == saved
    assert last(llm, GenerateRequest(FEW, tokens=PROMPT, slot=0)).usage.cached_tokens == len(PROMPT) - 1
    assert llm.ask(StateQuery()).slots == ()


def test_a_slot_is_saved_that_a_longer_text_stands_for(llm: LocalModel, tmp_path: Path) -> None:
    last(llm, GenerateRequest(FEW, tokens=PROMPT, slot=1))
    last(llm, GenerateRequest(FEW, tokens=(*PROMPT, *PROMPT[:30]), slot=2))
    assert llm.ask(SlotAction("save", 1, str(tmp_path / "slot"))).tokens >= len(PROMPT)


def test_why_a_slot_is_not_saved_or_restored(llm: LocalModel, tmp_path: Path) -> None:
    path = tmp_path / "slot"
    with pytest.raises(UserError, match="nothing is kept of slot 0"):
        llm.ask(SlotAction("save", 0, str(path)))
    with pytest.raises(UserError, match=r"^slot does not exist$"):
        llm.ask(SlotAction("restore", 0, str(path)))
    with pytest.raises(FieldError, match="slot 1000000 does not exist"):
        llm.ask(SlotAction("save", 10**6, str(path)))
    last(llm, GenerateRequest(FEW, tokens=PROMPT, slot=0))
    elsewhere = tmp_path / "elsewhere"
    path.symlink_to(elsewhere)
    with pytest.raises(UserError, match="symbolic link"):
        llm.ask(SlotAction("save", 0, str(path)))
    assert not elsewhere.exists()
    llm.ask(SlotAction("save", 0, str(elsewhere)))
    with pytest.raises(UserError, match="slot cannot be read"):
        llm.ask(SlotAction("restore", 0, str(path)))
    elsewhere.write_bytes(elsewhere.read_bytes()[:-1])
    with pytest.raises(UserError, match="elsewhere is damaged"):
        llm.ask(SlotAction("restore", 0, str(elsewhere)))


def test_a_slot_in_use_is_left_alone(llm: LocalModel) -> None:
    refused: list[str] = []

    def heard(event: Event) -> None:
        """On the engine's thread, while the request runs."""
        if not event.last:
            with pytest.raises(Overloaded, match="slot 5 is answering") as caught:
                llm.ask(SlotAction("erase", 5))
            refused.append(str(caught.value))
        else:
            over.set()

    over = threading.Event()
    llm.submit(GenerateRequest(FEW, tokens=PROMPT, slot=5), heard)
    assert over.wait(30)
    assert len(refused) == 5
    assert llm.ask(SlotAction("erase", 5)).tokens == len(PROMPT) + 4
