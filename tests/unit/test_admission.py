"""Who may come in, what is predicted for them, and how close that is to an engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import mean

import pytest
from hypothesis import assume, given, strategies as st

from hetrun.client.events import GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.engine.admission import (
    FIRST_ANSWER,
    MOST_RETRY_S,
    Admission,
    RequestForecast,
    RequestWork,
    in_front,
    in_words,
    letters,
)
from hetrun.engine.step_time import StepShape, StepTimes
from tests.support.step_times import Said, unpredicted
from tests.support.tiers import in_pairs

PLACES = 4


def planner(chunks: Sequence[tuple[int, float]]) -> float:
    """Seconds of a machine: 10 ms, and 1 ms for each token."""
    return 0.010 + 0.001 * sum(n for n, _ in chunks)


def admission(
    most_waiting: int | None = None, aside: float = 0.0, times: StepTimes | None = None
) -> Admission:
    return Admission(PLACES, times or StepTimes(Said(planner)), most_waiting=most_waiting, aside=aside)


def ran(times: StepTimes, answers: int, read: int, seconds: float) -> None:
    """A step with `answers` running answers and `read` tokens of a prompt took `seconds`."""
    if answers or read:
        times.observe(StepShape(answers + bool(read), answers + read, read), seconds)


def forecast(admission: Admission, own: RequestWork, others: Sequence[RequestWork] = ()) -> RequestForecast:
    found = admission.forecast(own, others)
    assert found is not None
    return found


works = st.builds(
    RequestWork,
    prompt=st.integers(0, 4000),
    answer=st.floats(0, 500),
    running=st.booleans(),
    priority=st.integers(-1, 1),
    client=st.sampled_from("ab"),
)
newcomers = works.map(lambda work: replace(work, running=False))
asides = st.sampled_from((0.0, 0.3, 0.5))


# --- predictions


@given(own=newcomers, aside=asides)
def test_an_empty_engine_takes_its_own_time(own: RequestWork, aside: float) -> None:
    found = forecast(admission(aside=aside), own)
    assert found.place_s == 0
    # The planner's times are asked at a few sizes, and lines drawn between these.
    assert found.first_s == pytest.approx(0.010 + 0.001 * own.prompt, rel=0.15, abs=0.011)
    assert found.end_s - found.first_s == pytest.approx(own.answer * 0.011)


@given(own=newcomers, others=st.lists(works, max_size=12), more=works, at=st.integers(0, 12), aside=asides)
def test_more_work_never_shortens_the_wait(
    own: RequestWork, others: list[RequestWork], more: RequestWork, at: int, aside: float
) -> None:
    asked, all_of_them = admission(aside=aside), [*others[:at], more, *others[at:]]
    # Clients take turns: a client's own request may push another one of it after this.
    assume(Counter(in_front(own, others)) <= Counter(in_front(own, all_of_them)))
    before = forecast(asked, own, others)
    after = forecast(asked, own, all_of_them)
    assert after.place_s >= before.place_s - 1e-9
    assert after.first_s >= before.first_s - 1e-9
    assert after.end_s >= before.end_s - 1e-9


@given(own=newcomers, others=st.lists(works, max_size=12), aside=asides)
def test_a_request_waits_for_its_place_then_its_first_token_then_its_end(
    own: RequestWork, others: list[RequestWork], aside: float
) -> None:
    asked = admission(aside=aside)
    found = forecast(asked, own, others)
    assert 0 <= found.place_s <= found.first_s <= found.end_s
    assert (found.place_s > 0) <= (len(others) >= PLACES)
    sooner = forecast(asked, replace(own, priority=own.priority - 1), others)
    assert sooner.first_s <= found.first_s + 1e-9


def test_nothing_runs_beside_the_encoding_of_pictures() -> None:
    own, other = RequestWork(1000, 10), RequestWork(100, 1000, running=True)
    alone, seeing = replace(own, pictures_s=3.0), replace(other, pictures_s=5.0)
    asked = admission(aside=0.5)
    first = forecast(asked, own, [other]).first_s
    assert forecast(asked, alone, [other]).first_s == pytest.approx(first + 3.0)
    assert forecast(asked, alone, [seeing]).first_s == pytest.approx(first + 8.0)
    assert forecast(asked, own, [seeing]).place_s == 0
    assert asked.refuse(alone, [seeing], deadline_left_s=first + 7.0) is not None
    assert asked.refuse(alone, [seeing], deadline_left_s=first + 9.0) is None


def test_running_answers_keep_their_share_until_they_are_over() -> None:
    own, short, long = (
        RequestWork(1000, 10),
        RequestWork(0, 10, running=True),
        RequestWork(0, 1000, running=True),
    )
    alone = forecast(admission(aside=0.5), own).first_s
    assert forecast(admission(aside=0.5), own, [short]).first_s == pytest.approx(alone + 10 * 0.012)
    assert forecast(admission(aside=0.5), own, [long]).first_s == pytest.approx(2 * alone)


def test_before_anything_is_known_nothing_is_predicted_and_no_deadline_refused() -> None:
    asked = admission(most_waiting=0, times=unpredicted())
    others = [RequestWork(100, 100, running=True)]
    assert asked.forecast(RequestWork(10, 10), others) is None
    assert asked.refuse(RequestWork(10, 10), others, 0.001) is None
    full = asked.refuse_arrival(PLACES, others)
    assert full is not None
    assert full.retry_after_s == 1


def test_what_was_seen_takes_the_place_of_the_planners_word() -> None:
    times = StepTimes(Said(planner))
    asked = admission(times=times)
    for _ in range(50):
        ran(times, 0, 512, 2.0)
        ran(times, 1, 0, 0.1)
    found = forecast(asked, RequestWork(512, 10))
    assert found.first_s == pytest.approx(2.0, rel=0.02)
    assert found.end_s == pytest.approx(3.0, rel=0.02)


def test_steps_of_both_kinds_are_told_apart() -> None:
    times = unpredicted()
    asked = admission(times=times)
    ran(times, 2, 100, 5.0)  # says nothing by itself
    assert asked.forecast(RequestWork(1, 1), []) is None
    ran(times, 0, 100, 0.9)
    ran(times, 2, 0, 0.1)
    for _ in range(100):
        ran(times, 2, 100, 2.0)  # twice as slow as the two together
    found = forecast(asked, RequestWork(100, 10), [RequestWork(0, 0, running=True)])
    assert found.first_s == pytest.approx(1.8, rel=0.01)
    assert found.end_s == pytest.approx(3.8, rel=0.01)


def test_how_long_answers_are_is_learned() -> None:
    asked = admission()
    assert asked.expected_answer(0, 10_000) == FIRST_ANSWER
    asked.finished(10, 80)
    assert asked.expected_answer(0, 10_000) == 80
    for _ in range(200):
        asked.finished(50, 40)
    assert asked.expected_answer(0, 10_000) == pytest.approx(40, rel=0.02)
    assert asked.expected_answer(20, 10_000) == pytest.approx(30, rel=0.03)
    assert asked.expected_answer(500, 10_000) == pytest.approx(10, rel=0.02)  # still not nothing
    assert asked.expected_answer(20, 25) == 5
    assert asked.expected_answer(20, 5000, certain=True) == 4980
    assert asked.expected_answer(30, 25, certain=True) == 0


# --- the order


def test_clients_take_turns_and_priorities_go_first() -> None:
    running = RequestWork(0, 9, running=True, priority=9, client="a")
    flood = [RequestWork(i, 1, client="a") for i in range(5)]
    urgent, patient = (
        RequestWork(100, 1, priority=-1, client="a"),
        RequestWork(200, 1, priority=1, client="a"),
    )
    others = [*flood, patient, running, urgent]
    assert in_front(RequestWork(0, 1, client="b"), others) == [running, flood[0], urgent]
    mine = RequestWork(50, 1, client="b")
    assert in_front(RequestWork(0, 1, client="b"), [*others, mine]) == [running, *flood[:2], urgent, mine]
    assert in_front(RequestWork(0, 1, client="a"), others) == [running, *flood, urgent]
    assert in_front(RequestWork(0, 1, priority=-1, client="b"), others) == [running, urgent]


# --- refusals


def test_the_queue_is_bounded() -> None:
    asked = admission(most_waiting=2)
    running = [RequestWork(0, 10.0 * i, running=True) for i in range(1, PLACES + 1)]
    assert [asked.refuse_arrival(held, running) is None for held in range(8)] == [True] * 6 + [False] * 2
    assert admission(most_waiting=None).refuse_arrival(10**6, running) is None
    none = admission(most_waiting=0)
    assert none.refuse_arrival(PLACES - 1, running) is None
    assert "0 requests wait already" in str(none.refuse_arrival(PLACES, running))


def test_who_is_sent_away_is_told_when_to_come_back_each_a_little_later() -> None:
    asked = admission(most_waiting=1)
    running = [RequestWork(0, 200.0, running=True)] * PLACES
    times = []
    for _ in range(200):
        refused = asked.refuse_arrival(PLACES + 1, running)
        assert refused is not None
        times.append(refused.retry_after_s or 0)
    assert times == sorted(times)
    assert times[0] == pytest.approx(200 * 0.014, rel=0.01)  # when the first place is free
    assert times[0] < times[1] < times[2]
    assert times[-1] == MOST_RETRY_S
    for _ in range(200):
        asked.finished(256, 256)
    refused = asked.refuse_arrival(PLACES + 1, running)
    assert refused is not None
    assert refused.retry_after_s == times[0]


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    asked, others = admission(), [RequestWork(10_000, 100, running=True)]
    refused = asked.refuse(RequestWork(100, 100), others, 3)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(7.1, abs=0.3)
    assert str(refused).startswith("the answer's first token is expected in 10 s, but wanted within 3 s")
    assert asked.refuse(RequestWork(100, 100), others, 11) is None
    refused = asked.refuse(RequestWork(100, 100), others, 11, whole=True)
    assert "the answer's end is expected in 11 s" in str(refused)
    assert asked.refuse(RequestWork(100, 100), others, None) is None
    assert asked.refuse(RequestWork(10_000, 100), [], 0.001) is None  # alone: it is measured instead


def test_how_much_of_a_text_must_be_read_is_learned() -> None:
    asked = admission()
    assert asked.expected_prompt(400) == 101
    for _ in range(200):
        asked.saw_prompt(1000, 100)  # most of it was cached
    assert asked.expected_prompt(400) == pytest.approx(41, abs=1)
    asked.saw_prompt(0, 10)  # it was given as tokens


def test_characters_of_a_prompt() -> None:
    params = SamplingParams()
    assert letters(GenerateRequest(params, text="x" * 400)) == 400
    assert letters(GenerateRequest(params, messages=({"content": "x" * 40}, {"content": None}))) == 40
    assert letters(GenerateRequest(params, tokens=(1, 2))) == 0


def test_seconds_in_words() -> None:
    assert [in_words(s) for s in (0.1234, 5, 12.34, 99.4, 99.6, 3600)] == [
        *("0.12 s", "5 s", "12 s", "99 s", "100 s", "3600 s")
    ]


# --- beside an engine


@dataclass(eq=False)
class Asked:
    """A request of the simulation."""

    at: float
    prompt: int
    answer: int
    read: int = 0
    given: int = 0
    first: float = 0.0
    predicted: float = 0.0  # its first token
    end: float = 0.0
    predicted_end: float = 0.0


@dataclass
class Machine:
    """A simulated engine: answers get a token a step, prompts what is left of the budget, oldest first.

    With `stretch` prompts have passes of their own, in which answers have a step from time to time.
    """

    admission: Admission
    times: StepTimes
    certain: bool  # lengths of answers are known, as where nothing ends them before max_tokens
    stretch: float | None = None
    budget: int = 256
    now: float = 0.0
    running: list[Asked] = field(default_factory=list)
    waiting: list[Asked] = field(default_factory=list)

    def work(self, asked: Asked) -> RequestWork:
        limit = asked.answer if self.certain else 2048
        left = self.admission.expected_answer(asked.given, limit, self.certain)
        return RequestWork(asked.prompt - asked.read, left, asked in self.running)

    def arrive(self, asked: Asked) -> None:
        others = [self.work(a) for a in (*self.running, *self.waiting)]
        found = self.admission.forecast(self.work(asked), others)
        if found:
            asked.predicted, asked.predicted_end = self.now + found.first_s, self.now + found.end_s
        self.waiting.append(asked)

    def step(self) -> None:
        while self.waiting and len(self.running) < self.admission.places:
            self.running.append(self.waiting.pop(0))
        answers = [a for a in self.running if a.read == a.prompt]
        missing = sum(a.prompt - a.read for a in self.running)
        if self.stretch and answers and missing:
            # In what order the pass and the steps in it come makes no difference to the sums.
            pause = (self.stretch - 1) * seconds_of(len(answers), 0)
            for _ in range(int(seconds_of(0, min(missing, self.budget)) / pause)):
                self.took([a for a in answers if a in self.running], 0)
            self.took([], self.read(self.budget))
        else:
            self.took(answers, self.read(self.budget - len(answers)))

    def read(self, most: int) -> int:
        read = 0
        for a in self.running:
            part = min(a.prompt - a.read, most - read)
            a.read += part
            read += part
        return read

    def took(self, answers: list[Asked], read: int) -> None:
        seconds = seconds_of(len(answers), read)
        self.now += seconds
        ran(self.times, len(answers), read, seconds)
        for a in self.running.copy():
            if a in answers or (a.read == a.prompt and not a.given):
                self.give(a)

    def give(self, a: Asked) -> None:
        a.given += 1
        a.first = a.first or self.now
        if a.given >= a.answer:
            self.running.remove(a)
            a.end = self.now
            self.admission.finished(a.prompt, a.given)


def seconds_of(answers: int, read: int) -> float:
    return 0.003 + 0.0006 * read + (0.008 + 0.001 * answers if answers else 0)


def simulated(load: float, certain: bool, stretch: float | None, seed: int) -> list[Asked]:
    """Requests at random times; `load` of 1 is as many as the machine can do."""
    chance, times = random.Random(seed), unpredicted()
    machine = Machine(Admission(8, times, aside=1 / stretch if stretch else 0), times, certain, stretch)
    done: list[Asked] = []
    at = 0.0
    for _ in range(400):
        at += chance.expovariate(load / 0.55)
        new = Asked(at, chance.randint(10, 800), chance.randint(5, 250))
        while machine.now < at and (machine.running or machine.waiting):
            machine.step()
        machine.now = max(machine.now, at)
        machine.arrive(new)
        done.append(new)
    while machine.running or machine.waiting:
        machine.step()
    return done[50:]  # until then it learns


@pytest.mark.parametrize(
    "case", in_pairs(product((0.2, 0.8, 0.95, 1.5), (True, False), (None, 2.4)), lambda case: case), ids=str
)
def test_predictions_beside_a_simulated_engine(case: tuple[float, bool, float | None]) -> None:
    load, certain, stretch = case
    asked = simulated(load, certain, stretch, seed=1)
    took = [a.first - a.at for a in asked]
    predicted = [a.predicted - a.at for a in asked]
    assert mean(predicted) == pytest.approx(mean(took), rel=0.25)
    wrong = [abs(p - t) for p, t in zip(predicted, took, strict=True)]
    assert mean(wrong) < (0.15 if certain else 0.3) * mean(took)
    # Later requests slow an answer down, which cannot be predicted.
    ended = mean(a.end - a.at for a in asked)
    assert 0.65 * ended < mean(a.predicted_end - a.at for a in asked) < 1.2 * ended
