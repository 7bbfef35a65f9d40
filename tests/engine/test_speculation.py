"""Several tokens a step: whatever is guessed, right or wrong, answers are those that come without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.backend import Floats
from hetrun.client.completion import completion
from hetrun.client.events import GenerateRequest, Timings
from hetrun.engine import factory
from hetrun.engine.engine import Engine
from hetrun.engine.speculation import methods, speculator
from hetrun.engine.speculation.draft_length import NOTHING, Decision
from hetrun.engine.speculation.interface import Speculation
from hetrun.errors import BackendError, UserError
from hetrun.executor.steps import Step
from hetrun.text.tokenizer import Tokenizer
from tests.engine.asking import SCRIPTS, Open, ask, ask_together
from tests.engine.fakemodel import FakeModel, loaded
from tests.models import cases, cases_hf, tiny
from tests.support.part_backends import backends
from tests.support.rig import Case, model_file

Text = Sequence[int]
RIGHT, WRONG, PARTLY, SELDOM = "right", "wrong", "partly", "seldom"
LENGTHS = (3, 1, 7, 15)
CHI_SQUARE = 0.0, 15.137, 18.421, 21.108, 23.513, 25.745  # by degrees of freedom: passed once in 10,000 times


@dataclass
class Guessing:
    """Guesses the answer that it was told, or spoils some of it."""

    tokens: list[int]
    n_prompt: int
    answers: Mapping[tuple[int, ...], Text]  # by prompt
    how: str
    closed: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def observe(self, first: int, hidden: Floats) -> None:
        """It needs no thoughts."""

    def follow(self) -> None:
        """It knows already."""

    def chances(self, n: int) -> Sequence[float]:
        if self.how == SELDOM and len(self.tokens) % 3:
            return ()
        return [0.9] * n

    def propose(self, n: int) -> list[int]:
        at = len(self.tokens) - self.n_prompt
        answer = list(self.answers.get(tuple(self.tokens[: self.n_prompt]), ()))
        found = (answer[at : at + n] + [1] * n)[:n]
        if self.how == WRONG or (self.how == PARTLY and n > 2):
            i = 0 if self.how == WRONG else (at + n) % n
            found[i] = (found[i] + 1) % 200
        return found

    def close(self) -> None:
        self.closed.append(len(self.tokens))


def guessing(
    answers: Mapping[tuple[int, ...], Text], how: str, closed: list[int] | None = None
) -> Speculation:
    gone = [] if closed is None else closed
    return Speculation(lambda tokens, n: Guessing(tokens, n, answers, how, gone), exact=False)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts pay, whatever steps take: of one length after the other, for all who have anything to try."""
    lengths = cycle(LENGTHS)

    def decide(candidates: Sequence[Any], depths: Text, costs: object, most: int, *_: object) -> Decision:
        length = next(lengths)
        able = [c.place for c in candidates if c.chances and c.most >= length][: most // length]
        return Decision(tuple(able), length, 1.0) if able else NOTHING

    monkeypatch.setattr(speculator, "decide", decide)


SCRIPT = {tuple(key.encode()): text for key, text in SCRIPTS.items()}


def fake(how: str = RIGHT, closed: list[int] | None = None) -> Callable[[], Any]:
    answers = {(*key, *key): text for key, text in SCRIPT.items()} | SCRIPT
    return lambda: guessing(answers, how, closed)


@pytest.fixture
def open_drafting(open_engine: Open) -> Iterator[Callable[..., tuple[Engine, FakeModel]]]:
    """An engine on a scripted model, and the guesses it tries. Prompts have two tokens: scripts cannot
    tell one from answers."""
    engines = []

    def opened(
        how: str, closed: list[int] | None = None, model: FakeModel | None = None
    ) -> tuple[Engine, FakeModel]:
        model = model or FakeModel(SCRIPTS)
        found = loaded(model)
        found.speculation = fake(how, closed)()
        engines.append(Engine(lambda: found))
        return engines[-1], model

    yield opened
    for engine in engines:
        engine.close()


Drafting = Callable[..., tuple[Engine, FakeModel]]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("how", [RIGHT, WRONG, PARTLY, SELDOM])
def test_tokens_come_one_by_one_whatever_is_guessed(open_drafting: Drafting, how: str) -> None:
    closed: list[int] = []
    engine, model = open_drafting(how, closed)
    answer = ask(engine, "aa").wait()
    assert [e.kind for e in answer.events] == ["token"] * 12 + ["done"]
    assert (answer.text, answer.last.finish_reason) == ("Hello, world", "stop")
    timings = answer.last.timings
    assert timings.drafted > 0
    assert 0 <= timings.accepted <= timings.drafted
    assert (timings.accepted > 0) == (how != WRONG)
    if how == RIGHT:
        assert len(model.steps) < 12
    assert closed == [14]
    assert model.texts == {}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("how", [RIGHT, PARTLY])
def test_what_ends_an_answer_drops_the_rest_of_a_draft(open_drafting: Drafting, how: str) -> None:
    engine, model = open_drafting(how, model=FakeModel(SCRIPTS, context=40))
    stopped = ask(engine, "aa", stop=["lo, w"]).wait()
    assert (stopped.text, stopped.last.finish_reason) == ("Hel", "stop")
    assert stopped.last.usage.completion_tokens == len("Hello, w")
    for n in range(1, 12):
        short = ask(engine, "aa", max_tokens=n).wait()
        assert (short.text, short.last.finish_reason) == ("Hello, world"[:n], "length")
    full = ask(engine, "l" * 12).wait()
    assert (full.text, full.last.finish_reason) == ("x" * 28, "length")
    assert max(n for step in model.steps for _, n in step) <= 16
    half = ask(engine, "uu").wait()
    assert [e.text for e in half.events] == ["G", "r", "", "ü", "", "ß", "e", ""]


@pytest.mark.usefixtures("always")
def test_several_together_of_which_some_draft(open_drafting: Drafting) -> None:
    engine, model = open_drafting(SELDOM)
    answers = ask_together(engine, *(2 * key for key in "abalblab"), max_tokens=30)
    texts = [a.wait().text for a in answers]
    assert texts == [SCRIPTS[key].decode()[:30] for key in "abalblab"]
    shapes = {tuple(n for _, n in step) for step in model.steps}
    assert any(len(set(shape)) > 1 for shape in shapes)
    # Those with drafts come first, so that as few different graphs as possible are made.
    assert all(list(shape) == sorted(shape, reverse=True) for shape in shapes)


@pytest.mark.usefixtures("always")
def test_no_draft_where_memory_is_short(open_drafting: Drafting) -> None:
    engine, model = open_drafting(RIGHT, model=FakeModel(SCRIPTS, ram=15))
    answer = ask(engine, "aa").wait()
    assert answer.text == "Hello, world"
    assert model.touched <= 15


@pytest.mark.usefixtures("always")
def test_a_model_that_cannot_is_given_none(open_drafting: Drafting) -> None:
    engine, model = open_drafting(RIGHT, model=FakeModel(SCRIPTS, alike=0))
    answer = ask(engine, "aa").wait()
    assert (answer.text, answer.last.timings.drafted) == ("Hello, world", 0)
    assert [n for step in model.steps for _, n in step] == [2, *[1] * 12]


@pytest.mark.usefixtures("always")
def test_cancelled_in_the_middle_of_a_draft(open_drafting: Drafting) -> None:
    def block(model: FakeModel, step: Step) -> None:
        if step.tokens > 1 and not model.inside.is_set():
            model.block(step)

    closed: list[int] = []
    engine, model = open_drafting(RIGHT, closed, model=FakeModel(SCRIPTS, before=block))
    answer = ask(engine, "ll")
    assert model.inside.wait(30)
    engine.cancel(answer.id)
    assert answer.wait().last.finish_reason == "cancelled"
    assert len(closed) == 1
    assert ask(engine, "aa").wait().text == "Hello, world"


@pytest.mark.usefixtures("always")
def test_a_step_with_a_draft_that_fails(open_drafting: Drafting) -> None:
    def fail(model: FakeModel, step: Step) -> None:
        if step.tokens > 3:
            raise BackendError("broken")

    closed: list[int] = []
    engine, _ = open_drafting(RIGHT, closed, model=FakeModel(SCRIPTS, before=fail))
    answer = ask(engine, "ll", max_tokens=50).wait()
    assert isinstance(answer.last.error, BackendError)
    assert len(closed) == 1


def test_a_text_that_does_not_repeat_itself_pays_nothing(open_engine: Open) -> None:
    model = FakeModel({"a": bytes(range(32, 92))})
    found = loaded(model)
    found.speculation = methods.lookup(exact=True)
    engine = Engine(lambda: found)
    try:
        answer = ask(engine, "aa").wait()
        assert answer.last.timings == Timings(**{**vars_of(answer.last.timings), "drafted": 0, "accepted": 0})
    finally:
        engine.close()


def vars_of(timings: Timings) -> dict[str, Any]:
    return {name: getattr(timings, name) for name in timings.__dataclass_fields__}


# --- real models, with --deterministic where that is more than single rows: then rows have the same bits,
# whatever is known already of a prompt


PROMPTS = [tiny.random_tokens(n, seed=n) for n in (3, 37, 12)]
OWN = [cases.QUANTISED[i] for i in (2, 3, 5, 7)]  # types that our own products take
MODELS = [
    *[pytest.param(case, name, id=f"{case}-{name}") for case in (cases.GQA, *OWN) for name in backends()],
    *cases_hf.crossed(cases_hf.NAMES, cases_hf.EACH, backends()),
]


def answers_of(llm: LocalModel, params: SamplingParams) -> dict[tuple[int, ...], list[int]]:
    """Each prompt's alone."""
    return {tuple(p): llm.generate([p], params)[0].tokens for p in PROMPTS}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("case", "backend"), MODELS)
def test_greedy_answers_are_the_same(case: Case, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, params = model_file(case), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    own = case in OWN and backend == "llamacpp"
    options: dict[str, Any] = {"backends": [backend], "deterministic": own}
    with LocalModel(file, **options, spec="off") as llm:
        expected = answers_of(llm, params)
    for how in (RIGHT, WRONG, PARTLY):
        monkeypatch.setattr(factory, "speculation_of", lambda *_, how=how: guessing(expected, how))
        with LocalModel(file, **options) as llm:
            assert answers_of(llm, params) == expected
            together = llm.generate(PROMPTS, params)
            assert sum(c.timings.drafted for c in together) > 0
            if own:
                assert [c.tokens for c in together] == list(expected.values())


@pytest.fixture(scope="module")
def expected_of() -> Iterator[
    Callable[[SamplingParams], tuple[LocalModel, dict[tuple[int, ...], list[int]]]]
]:
    """Answers without speculation, of one model."""
    with LocalModel(model_file(OWN[0]), deterministic=True, spec="off") as llm:
        yield lambda params: (llm, answers_of(llm, params))


GRAMMAR = "[a-z]{3}( [a-z]{3}){4}"


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"repeat_penalty": 1.4, "presence_penalty": 0.5},
        {"dry_multiplier": 0.8},
        {"mirostat": 2},
        {"regex": GRAMMAR, "ignore_eos": False},
        {"stop": ("e",)},
        {"logprobs": 3},
        {"prompt_logprobs": 1},
        {"temperature": 0.0, "logit_bias": {5: 3.0}},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
@pytest.mark.parametrize("how", [RIGHT, PARTLY])
def test_whatever_follows_the_text_follows_it_token_by_token(
    expected_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], how: str
) -> None:
    params = SamplingParams(**{"max_tokens": 40, "temperature": 1.0, "seed": 3, "ignore_eos": True, **more})
    plain, answers = expected_of(params)
    monkeypatch.setattr(factory, "speculation_of", lambda *_: guessing(answers, how))
    with LocalModel(model_file(OWN[0]), deterministic=True) as llm:
        for prompt in PROMPTS:
            mine, its = llm.generate([prompt], params)[0], plain.generate([prompt], params)[0]
            assert (mine.tokens, mine.text, mine.finish_reason) == (its.tokens, its.text, its.finish_reason)
            assert mine.usage.completion_tokens == its.usage.completion_tokens
            assert [e.token for e in mine.logprobs] == [e.token for e in its.logprobs]
            assert mine.prompt_logprobs == its.prompt_logprobs


@pytest.mark.usefixtures("always")
def test_draws_are_distributed_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other seeds with drafts than without: only the distribution can be the same."""
    prompt, bias = PROMPTS[0], {t: (50.0 if t < 6 else 0.0) for t in range(6)}
    params = [
        SamplingParams(max_tokens=6, temperature=1.0, top_k=0, top_p=1, min_p=0, seed=s, logit_bias=bias)
        for s in range(400)
    ]
    guesses = {tuple(prompt): [3, 1, 2, 0, 4, 5]}

    def drawn(seeds: Sequence[SamplingParams]) -> np.ndarray:
        with LocalModel(model_file(OWN[0]), deterministic=True) as llm:
            requests = [GenerateRequest(p, tokens=tuple(prompt)) for p in seeds]
            # One by one: how long drafts are, and so what is drawn, would depend on who else is in a step.
            found = [completion(llm.collect([request])[0]).tokens for request in requests]
        return np.array(
            [np.bincount([t[i] for t in found if len(t) > i], minlength=6)[:6] for i in range(1, 6)]
        )

    monkeypatch.setattr(factory, "speculation_of", lambda *_: None)
    without = drawn(params[:200])
    monkeypatch.setattr(factory, "speculation_of", lambda *_: guessing(guesses, RIGHT))
    drafted = drawn(params[200:])
    for a, b in zip(without, drafted, strict=True):
        seen = (a + b) > 0
        observed = np.array([a, b])[:, seen]
        expected = np.outer(observed.sum(1), observed.sum(0)) / observed.sum()
        assert ((observed - expected) ** 2 / expected).sum() <= CHI_SQUARE[seen.sum() - 1]


@pytest.mark.usefixtures("always")
def test_what_was_tried_and_taken_back_is_not_kept_for_the_next_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with LocalModel(model_file(OWN[0]), deterministic=True, spec="off") as llm:
        answers = answers_of(llm, params)
    monkeypatch.setattr(factory, "speculation_of", lambda *_: guessing(answers, PARTLY))
    with LocalModel(model_file(OWN[0]), deterministic=True) as llm:
        for prompt in PROMPTS:
            first = llm.generate([prompt], params)[0]
            longer = [*prompt, *first.tokens, 5]
            again = llm.generate([longer], params)[0]
            assert again.usage.cached_tokens > len(prompt)
            with LocalModel(model_file(OWN[0]), deterministic=True, spec="off") as plain:
                assert plain.generate([longer], params)[0].tokens == again.tokens


# --- a model that guesses


@pytest.mark.usefixtures("always")
def test_answers_are_the_same_with_a_draft_model() -> None:
    file, other = model_file(OWN[0]), model_file(replace(OWN[0], name="another", seed=9))
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with LocalModel(file, deterministic=True, spec="off") as llm:
        expected = answers_of(llm, params)
    for draft, least, most in ((file, 0.9, 1.0), (other, 0.0, 0.5)):
        with LocalModel(file, deterministic=True, spec=f"draft:{draft}") as llm:
            together = llm.generate(PROMPTS, params)
            assert [c.tokens for c in together] == list(expected.values())
            timings = llm.generate(PROMPTS[:1], params)[0].timings
        assert least <= timings.accepted / timings.drafted <= most


def test_a_draft_model_that_cannot_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = model_file(OWN[0])
    with pytest.raises(UserError, match="does not exist; --spec draft:MODEL takes a"):
        LocalModel(file, spec=f"draft:{tmp_path / 'none.gguf'}")
    vocabularies = count()
    monkeypatch.setattr(Tokenizer, "pieces", lambda _: [b"%d" % next(vocabularies)])
    with pytest.raises(UserError, match="cannot be the draft model: its vocabulary is different"):
        LocalModel(file, spec=f"draft:{file}")
