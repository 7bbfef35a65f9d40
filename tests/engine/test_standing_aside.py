"""A long pass stands aside: what runs, ends and comes in the middle of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from hetrun.client.events import Event, GenerateRequest, Streaming
from hetrun.client.sampling_params import SamplingParams
from hetrun.engine.batching import FEW, SHORT
from hetrun.engine.step_time import Clock
from hetrun.errors import Cancelled, DeadlineExceeded, EngineStopped, Overloaded
from hetrun.executor.steps import Between, Step
from tests.engine.asking import SCRIPTS, Answer, Open, ask
from tests.engine.fakemodel import FakeModel

LONG = SHORT + 100  # tokens of a prompt that gets a pass of its own
PAUSES = 12  # in a long pass


@dataclass
class Aside(FakeModel):
    """Stands aside in the middle of what is no step of answers. Its predictions say that steps take no time,
    so that answers are always in a hurry."""

    scripts: dict[str, bytes] = field(default_factory=lambda: dict(SCRIPTS))
    ubatch: int = 1024
    context: int = 2048
    stands_aside: bool = True
    pauses: int = PAUSES
    within: Callable[[int], object] = lambda pause: None  # called at each pause, before others run
    room: int = 1 << 30  # tokens of all sequences
    log: list[str] = field(default_factory=list)

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        return 1e-6 * sum(n for n, _ in chunks)

    def fits(self, chunks: Sequence[tuple[int, int]]) -> bool:
        return sum(map(len, self.texts.values())) + sum(n for _, n in chunks) <= self.room

    def step(self, step: Step, between: Between | None = None) -> np.ndarray:
        long = any(len(c.tokens) > SHORT for c in step.chunks)
        if between and long:
            self.log.append("begin")
            pause = 0
            while pause < self.pauses:
                if self.cancelled.is_set():
                    raise Cancelled("stopped")
                self.within(pause)
                between()
                pause += 1
        self.log.append("end" if long else "short")
        return super().step(step, between)

    def _logits(self, seq: int, length: int) -> np.ndarray:
        """As much of the script was played as the text ends with: a sequence may come back with its
        answer."""
        text, logits = bytes(self.texts[seq][:length]), np.zeros(self.n_vocab, np.float32)
        script = self.scripts.get(chr(text[0]), b"")
        at = next(k for k in range(min(len(script), length - 1), -1, -1) if text.endswith(script[:k]))
        logits[script[at] if at < len(script) else 256] = 10
        return logits


@dataclass
class Noted(Answer):
    """Writes into a list that it is over, or calls a function with each event's number."""

    name: str = ""
    order: list[str] = field(default_factory=list)
    each: Callable[[int], object] = lambda n: None

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        self.each(len(self.events))
        if event.last:
            self.order.append(self.name)


def at(pause: int, action: Callable[[], object]) -> Callable[[int], object]:
    """Calls a function at one pause of a long pass."""

    def within(now: int) -> None:
        if now == pause:
            action()

    return within


def long_prompt(first: str) -> str:
    return first + "-" * (LONG - 1)


@pytest.fixture(autouse=True)
def as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine's clock each step takes what was predicted."""

    def seconds(clock: Clock) -> float:
        model = clock._model
        assert isinstance(model, FakeModel)
        return model.predict([(n, 0.0) for _, n in model.steps[-1]]) or 0.0

    monkeypatch.setattr(Clock, "seconds", seconds)


def test_answers_go_on_while_a_long_prompt_is_computed(open_engine: Open) -> None:
    model = Aside()
    engine = open_engine(model)
    other = Answer()

    def start(n: int) -> None:
        if n == 3:  # on the engine's thread: the long one is there before the next step
            ask(engine, long_prompt("b"), other)

    answer = ask(engine, "l", Noted(each=start), max_tokens=40)
    assert (answer.wait().text, other.wait().text) == ("x" * 40, "123456789")
    inside = model.log[model.log.index("begin") + 1 : model.log.index("end")]
    assert set(inside) == {"short"}
    assert len(inside) >= PAUSES - 1  # the first pause may come too soon


@pytest.mark.parametrize("from_disk", [False, True])
def test_a_pass_that_reads_weights_takes_all_of_a_prompt_when_no_other_request_waits(
    open_engine: Open, from_disk: bool
) -> None:
    model = Aside(stands_aside=False)
    # A pass takes seconds, so that of each prompt a few tokens at a time are computed.
    model.predict = lambda chunks: 5.0  # type: ignore[method-assign]
    model.from_disk = Streaming(1, 1, 1.0, 0.5, 1.0, 1, 1, 1, 1) if from_disk else None
    answer = ask(open_engine(model), long_prompt("b"))
    assert answer.wait().text == "123456789"
    prompts = [tokens for ((_, tokens),) in model.steps if tokens > 1]
    assert prompts == ([LONG] if from_disk else [FEW] * (LONG // FEW) + [LONG % FEW])


def test_a_short_prompt_does_not_wait_for_a_long_one(open_engine: Open) -> None:
    model, answer = Aside(), Answer()
    engine = open_engine(model)
    model.pauses = sys.maxsize

    def look(pause: int) -> None:
        if pause == 1:
            ask(engine, "a", answer)
        if answer.over.is_set():
            model.pauses = 0  # the long pass goes on only until the short answer is complete

    model.within = look
    long = ask(engine, long_prompt("b"))
    assert (answer.wait().text, long.wait().text) == ("Hello, world", "123456789")
    assert model.log.index("end") > model.log.index("short")


def test_cancelling_the_long_one_in_the_middle_leaves_the_others(open_engine: Open) -> None:
    model = Aside()
    engine = open_engine(model)
    long = Answer()
    answer = ask(engine, "l", max_tokens=200)
    model.within = at(5, lambda: engine.cancel(long.id))
    ask(engine, long_prompt("b"), long)
    assert long.wait().last.finish_reason == "cancelled"
    assert not long.tokens
    assert answer.wait().text == "x" * 200
    assert "end" not in model.log
    assert ask(engine, "a").wait().text == "Hello, world"
    assert not model.texts


def test_cancelling_an_answer_in_the_middle_leaves_the_long_one(open_engine: Open) -> None:
    model = Aside()
    engine = open_engine(model)
    answer = ask(engine, "l", max_tokens=2000)
    model.within = at(5, lambda: engine.cancel(answer.id))
    long = ask(engine, long_prompt("b"))
    assert long.wait().text == "123456789"
    assert answer.wait().last.finish_reason == "cancelled"
    assert model.log.count("begin") == 1
    assert not model.texts


def test_a_call_waits_for_the_end_of_the_pass(open_engine: Open) -> None:
    model = Aside()
    engine = open_engine(model)
    seen: list[str] = []

    def within(pause: int) -> None:
        if pause == 2:
            caller = threading.Thread(target=lambda: engine.call(lambda _: seen.append(model.log[-1])))
            caller.start()

    model.within = within
    assert ask(engine, long_prompt("b")).wait().text == "123456789"
    engine.call(lambda _: None)
    assert seen
    assert seen[0] != "begin"


def test_closing_in_the_middle_tells_everybody(open_engine: Open) -> None:
    model = Aside()
    engine = open_engine(model)
    answer, long = ask(engine, "l", max_tokens=2000), Answer()
    model.within = at(3, lambda: threading.Thread(target=engine.close).start())
    model.pauses = sys.maxsize
    ask(engine, long_prompt("b"), long)
    for a in (answer, long):
        assert isinstance(a.wait().last.error, EngineStopped)


def test_an_error_in_the_middle_is_that_of_the_others(open_engine: Open) -> None:
    model = Aside()
    engine = open_engine(model)
    broken = RuntimeError("no more")

    def fail(_: FakeModel, step: Step) -> None:
        if step.tokens == 1 and "begin" in model.log:
            model.before = lambda model, step: None
            raise broken

    model.before = fail
    answer = ask(engine, "l", max_tokens=500)
    long = ask(engine, long_prompt("b"))
    assert answer.wait().last.error is broken
    assert long.wait().text == "123456789"
    assert not model.texts


def test_a_long_prompt_without_company_is_one_pass(open_engine: Open) -> None:
    model = Aside()
    engine = open_engine(model)
    assert ask(engine, long_prompt("b")).wait().text == "123456789"
    assert model.log[:2] == ["begin", "end"]


def test_few_tokens_go_with_the_answers(open_engine: Open) -> None:
    model = Aside()
    engine = open_engine(model)
    answers = engine.call(lambda _: [ask(engine, p) for p in ("l", "b" * (FEW - 2))])
    assert answers[1].wait().text == "123456789"
    assert "begin" not in model.log


# --- memory


def test_the_youngest_gives_its_memory_up_and_computes_it_again(open_engine: Open) -> None:
    """Each alone has room, both have not; nothing is lost and nothing told twice."""
    model = Aside(room=230)
    engine = open_engine(model)
    answers = engine.call(lambda _: [ask(engine, "l", max_tokens=150), ask(engine, "l-", max_tokens=150)])
    assert [a.wait().text for a in answers] == ["x" * 150] * 2
    assert answers[0].last.timings.ttft_s > 0
    assert len(model.freed) > 2
    assert not model.texts


def test_who_is_less_urgent_gives_way_though_it_came_first(open_engine: Open) -> None:
    model = Aside(room=230)
    engine = open_engine(model)
    order: list[str] = []

    def answer(name: str, priority: int) -> Answer:
        a = Noted(name=name, order=order)
        engine.submit(GenerateRequest(SamplingParams(max_tokens=150), text="l", priority=priority), a)
        return a

    both = engine.call(lambda _: [answer("later", 1), answer("now", 0)])
    assert [a.wait().text for a in both] == ["x" * 150] * 2
    assert order == ["now", "later"]


def test_a_request_that_is_alone_and_too_large_is_told(open_engine: Open) -> None:
    class Full(Aside):
        def step(self, step: Step, between: Between | None = None) -> np.ndarray:
            if not self.fits([(c.seq, len(c.tokens)) for c in step.chunks]):
                raise RuntimeError("full")
            return super().step(step, between)

    engine = open_engine(Full(room=50))
    assert str(ask(engine, "l", max_tokens=100).wait().last.error) == "full"


def test_cancelling_one_that_gave_its_place_up(open_engine: Open) -> None:
    model = Aside(room=230)
    engine = open_engine(model)
    first, second = engine.call(
        lambda _: [ask(engine, "l", max_tokens=180), ask(engine, "l-", max_tokens=180)]
    )

    def cancel(model: FakeModel, step: Step) -> None:
        if model.freed:
            engine.cancel(second.id)
        elif len(step.chunks) == 1:
            # Threads prepare requests: on a busy machine one answer may be complete before the other begins.
            model.inside.wait(0.01)

    model.before = cancel
    assert second.wait().last.finish_reason == "cancelled"
    assert first.wait().text == "x" * 180


# --- who goes first, and until when


def test_clients_take_turns_however_many_requests_they_have(open_engine: Open) -> None:
    model = Aside(ubatch=LONG)
    engine = open_engine(model)
    order: list[str] = []

    def answer(client: str) -> Answer:
        a = Noted(name=client, order=order)
        request = GenerateRequest(SamplingParams(max_tokens=1), text=long_prompt("l"), client=client)
        engine.submit(request, a)
        return a

    everybody = engine.call(lambda _: [answer("many") for _ in range(4)] + [answer("one")])
    for a in everybody:
        a.wait()
    assert order == ["many", "one", "many", "many", "many"]


@pytest.mark.parametrize("prompt", ["l", "never"])
def test_a_deadline_ends_a_request(open_engine: Open, prompt: str) -> None:
    """One that runs, and one that waits for a place."""
    # However fast this machine is, no answer is complete before.
    model = Aside(max_sequences=1, before=lambda model, step: model.inside.wait(0.001))
    engine = open_engine(model)
    running = ask(engine, "l", max_tokens=2000) if prompt == "never" else None
    late = Answer()
    engine.submit(GenerateRequest(SamplingParams(max_tokens=2000), text="l", deadline_s=0.02), late)
    # Beside another one it may be refused at once, if that can be foretold already.
    assert isinstance(late.wait().last.error, (DeadlineExceeded, Overloaded) if running else DeadlineExceeded)
    if running:
        engine.cancel(running.id)
        assert running.wait().last.finish_reason in ("cancelled", "length", "stop")


# --- a model that looks after itself, and prepares for what comes


@dataclass
class Pondering(Aside):
    """Thinks for long while nothing runs."""

    meanwhile: Callable[[], bool] = lambda: False  # whether that takes longer

    def tend(self, idle: bool = False, between: Between | None = None) -> None:
        while idle and between and self.meanwhile():
            between()


@pytest.mark.parametrize("prompt", ["a", "a" * LONG])
def test_what_comes_while_an_idle_model_is_looked_after_is_not_forgotten(
    open_engine: Open, prompt: str
) -> None:
    model, answer = Pondering(), Answer()
    engine = open_engine(model)

    def thinks() -> bool:
        if not answer.id:
            ask(engine, prompt, answer)
        return not model.prompts  # until it has a place

    model.meanwhile = thinks
    assert answer.wait().text == "Hello, world"


@pytest.mark.parametrize("what", ["call", "close"])
def test_neither_are_calls_and_the_end(open_engine: Open, what: str) -> None:
    model, thinking, came = Pondering(), threading.Event(), threading.Event()
    engine = open_engine(model)

    def thinks() -> bool:
        """Until something has come, and was taken out of the inbox."""
        thinking.set()
        while not came.is_set() and engine._inbox.empty():
            came.wait(0.001)
        came.set()
        return not engine._inbox.empty()

    model.meanwhile = thinks
    assert thinking.wait(30)
    asked = threading.Thread(target={"close": engine.close, "call": lambda: engine.call(str)}[what])
    asked.start()
    asked.join(30)
    assert not asked.is_alive()


@dataclass
class Tended(Aside):
    """Notes when it is looked after."""

    def tend(self, idle: bool = False, between: Between | None = None) -> None:
        self.log.append("tend")


def test_a_model_is_not_looked_after_between_long_passes(open_engine: Open) -> None:
    """What is tried for the plan's sake would hold up the answers once more, which are due by then."""
    model, long = Tended(ubatch=LONG), Answer()
    engine = open_engine(model)

    def start(n: int) -> None:
        if n == 3:
            ask(engine, "b" + "-" * (3 * LONG - 1), long)

    answer = ask(engine, "l", Noted(each=start), max_tokens=200)
    assert (answer.wait().text, long.wait().text) == ("x" * 200, "123456789")
    ends = [i for i, what in enumerate(model.log) if what == "end"]
    assert len(ends) == 3
    assert "tend" not in [model.log[i + 1] for i in ends]
    assert "tend" in model.log[: ends[0]], "between steps of answers it is"


@dataclass
class Preparing(Aside):
    """Prepares for long prompts; `meanwhile` is called at each of its pauses, before others run, and says
    whether that takes longer."""

    meanwhile: Callable[[int], bool] = lambda pause: pause < PAUSES
    prepared: list[int] = field(default_factory=list)  # for how many tokens

    def expect(self, tokens: int, between: Between | None = None) -> None:
        if between and tokens > SHORT:
            pause = 0
            while self.meanwhile(pause):
                between()
                pause += 1
            self.prepared.append(tokens)


def test_answers_begin_go_on_and_end_while_a_model_prepares(open_engine: Open) -> None:
    model, running, newcomer, long = Preparing(), Answer(), Answer(), Answer()
    engine = open_engine(model)
    seen: list[int] = []

    def goes_on(pause: int) -> bool:
        if pause == 3:
            ask(engine, "a", newcomer)
        seen.append(len(running.events))
        return not newcomer.over.is_set()

    model.meanwhile = goes_on
    engine.call(lambda _: [ask(engine, "l", running, max_tokens=900), ask(engine, long_prompt("b"), long)])
    assert (newcomer.wait().text, long.wait().text) == ("Hello, world", "123456789")
    assert running.wait().text == "x" * 900
    assert seen[-1] - seen[3] >= len("Hello, world"), "both went on"


def test_who_is_cancelled_while_a_model_prepares_ends_at_once(open_engine: Open) -> None:
    model, long = Preparing(), Answer()
    engine = open_engine(model)
    ended: list[bool] = []

    def goes_on(pause: int) -> bool:
        if pause == 2:
            engine.cancel(long.id)
        ended.append(long.over.is_set())
        return pause < PAUSES

    model.meanwhile = goes_on
    assert ask(engine, long_prompt("b"), long).wait().last.finish_reason == "cancelled"
    assert ask(engine, "a").wait().text == "Hello, world"
    assert ended == [False] * 3 + [True] * (PAUSES - 2)
    assert len(model.prepared) == 1, "it is there for the next one"


def test_a_model_that_prepares_can_be_closed(open_engine: Open) -> None:
    inside = threading.Event()

    def goes_on(pause: int) -> bool:
        inside.set()
        return True

    model = Preparing(meanwhile=goes_on)
    engine = open_engine(model)
    long = ask(engine, long_prompt("b"))
    assert inside.wait(30)
    engine.close()
    assert isinstance(long.wait().last.error, EngineStopped)
    assert model.closed.is_set()
    assert not model.prepared


def test_a_model_prepares_for_those_who_came_meanwhile_as_well(open_engine: Open) -> None:
    model, other = Preparing(), Answer()
    engine = open_engine(model)

    def goes_on(pause: int) -> bool:
        if not other.id:
            ask(engine, long_prompt("a"), other)
        return len(model.prompts) < 2  # until it has a place

    model.meanwhile = goes_on
    assert ask(engine, long_prompt("b")).wait().text == "123456789"
    assert other.wait().text == "Hello, world"
    assert model.prepared == [LONG, 2 * LONG]
