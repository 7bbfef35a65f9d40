"""Prompts with pictures: the engine says what a model says that is given rows and places by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hetrun.backend import Available, Descriptor, registry
from hetrun.backend.interpreter import InterpretingBackend
from hetrun.backends.reference.ops import TABLE
from hetrun.client.events import Event, GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.engine.engine import Engine
from hetrun.engine.loaded_model import LoadedModel
from hetrun.errors import BudgetError, ContextFull, OptionError, PictureError
from hetrun.executor.plan_prediction import predict_plans
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Step
from hetrun.graph import Op
from hetrun.graph.ops import Attention
from hetrun.loader.open_model import open_model
from hetrun.memory import breakdown
from hetrun.planner.options import Options, Wishes
from tests.engine.asking import Answer
from tests.engine.seeing import MARK, WIDTH, ask, ask_file, opened, said, seeing, vision_of
from tests.support.once import once
from tests.support.picture_encoder import LinearEncoder, drawn, file_of
from tests.support.towers import write_text

PICTURE = drawn(48, 32)  # 24 rows
ROWS = 24
LONG = "The quick brown fox jumps over the lazy dog, and then it does the same again and again. "
TEXTS = (
    f"Look: {MARK} what is it?",
    f"{MARK}What is on this picture, and why?",
    f"The first one {MARK} and the second one {MARK} differ in",
    f"{LONG}{MARK}",
)
Texts = Callable[[str], Path]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """The text model of a family."""

    def text_of(family: str) -> Path:
        def make(folder: Path) -> None:
            write_text(family, folder / "text.gguf")

        return once(tmp_path_factory, f"sees-{family}", make) / "text.gguf"

    return text_of


def steps_of(engine: Engine) -> list[list[tuple[int, bool]]]:
    """Of each step from now on: for each chunk its tokens, and whether they are rows of a picture."""
    found: list[list[tuple[int, bool]]] = []

    def watch(loaded: LoadedModel) -> None:
        model = loaded.model
        assert isinstance(model, PlannedModel)
        run = model._executor._run

        def watched(step: Step, *rest: object) -> object:
            found.append([(len(c.tokens), c.embedded is not None) for c in step.chunks])
            return run(step, *rest)  # type: ignore[arg-type]

        model._executor._run = watched  # type: ignore[method-assign,assignment]

    engine.call(watch)
    return found


@pytest.mark.parametrize(("family", "text"), [
    *(("qwen35", text) for text in TEXTS), ("mistral3", TEXTS[0]), ("mistral3", TEXTS[2]),
    ("qwen3vl-flat", TEXTS[2]),
])  # fmt: skip
def test_greedy(monkeypatch: Patch, texts: Texts, family: str, text: str) -> None:
    path, spatial = texts(family), family != "mistral3"
    pictures = [drawn(48, 32, seed) for seed in range(text.count(MARK))]
    expected = said(path, LinearEncoder(WIDTH, spatial), text, *pictures)
    encoder = LinearEncoder(WIDTH, spatial)
    with seeing(monkeypatch, path, encoder) as engine:
        answer = ask(engine, text, *pictures, ignore_eos=True).wait()
        assert answer.tokens == expected
        assert encoder.threads == {engine.thread_id}
        assert len(encoder.encoded) == len(pictures)


@pytest.mark.parametrize("backend", ["reference", "llamacpp"])
def test_parts_words_and_small_passes(monkeypatch: Patch, texts: Texts, backend: str) -> None:
    """Pictures in parts, with words around them, in passes that are shorter than a picture."""
    path, text = texts("qwen35"), f"{LONG}One {MARK} and {MARK} two"
    pictures = drawn(48, 64, 3), drawn(24, 24, 4)
    encoder = LinearEncoder(WIDTH, around=((5, 6), (7,)), parts=2)
    expected = said(path, encoder, text, *pictures)
    with seeing(monkeypatch, path, encoder, backends=backend, ubatch=16) as engine:
        steps = steps_of(engine)
        assert ask(engine, text, *pictures, ignore_eos=True).wait().tokens == expected
    assert max(n for step in steps for n, _ in step) <= 16


@pytest.mark.parametrize("family", ["qwen35", "gemma3"])
def test_rows_that_see_each_other(monkeypatch: Patch, texts: Texts, family: str) -> None:
    """They are one pass, also beside others, and need one that is long enough."""
    path, text, spatial = texts(family), f"One {MARK} and {MARK} two", family == "qwen35"
    pictures = (drawn(48, 32, 3), drawn(24, 24, 4))
    expected = said(path, LinearEncoder(WIDTH, spatial, whole=True), text, *pictures)
    assert expected != said(path, LinearEncoder(WIDTH, spatial), text, *pictures)
    with seeing(monkeypatch, path, LinearEncoder(WIDTH, spatial, whole=True), ubatch=24) as engine:
        steps = steps_of(engine)
        both = engine.call(lambda _: [ask(engine, text, *pictures, ignore_eos=True) for _ in range(2)])
        other = ask(engine, LONG, ignore_eos=True, max_tokens=20)
        assert [answer.wait().tokens for answer in both] == [expected, expected]
        assert other.wait().last.error is None
        assert {n for step in steps for n, is_rows in step if is_rows} == {24, 9}
        error = ask(engine, f"See {MARK}", drawn(64, 64)).wait().last.error
        assert isinstance(error, OptionError)
        assert "use --ubatch 64 or more" in str(error)


def test_deeper_rows(monkeypatch: Patch, texts: Texts) -> None:
    """Blocks for the first layers, for which texts pay nothing."""
    path, text = texts("qwen3vl"), f"One {MARK} and two"
    wide = LinearEncoder(3 * WIDTH, deepstack=2)
    expected = said(path, wide, text, PICTURE)
    with seeing(monkeypatch, path, wide) as engine:
        assert ask(engine, text, PICTURE, ignore_eos=True).wait().tokens == expected
        model = engine.call(lambda loaded: loaded.model)
        assert isinstance(model, PlannedModel)
        segments = model.stats.segments
        ask(engine, "One", max_tokens=1).wait()
        assert model.stats.segments == segments + sum(map(len, model.plans.plan(3).stages))


def test_asked_twice(monkeypatch: Patch, texts: Texts) -> None:
    """The second question about a picture computes what is new, and encodes nothing."""
    path, begin = texts("qwen35"), f"{LONG}Look: {MARK} "
    encoder = LinearEncoder(WIDTH)
    with seeing(monkeypatch, path, encoder) as engine:
        ask(engine, begin + "what is it?", PICTURE).wait()
        steps = steps_of(engine)
        second = ask(engine, begin + "who made it?", PICTURE, ignore_eos=True).wait()
        assert encoder.encoded == [PICTURE.digest]
        before = second.last.usage.cached_tokens
        assert steps[0] == [(second.last.usage.prompt_tokens - before, False)]
        assert steps[0][0][0] < 16
        assert engine.held.counts.pictures == engine.held.counts.pictures_cached == 1
        assert second.last.timings.picture_s == 0
    # The same prompt without anything cached says the same.
    with seeing(monkeypatch, path, LinearEncoder(WIDTH)) as engine:
        alone = ask(engine, begin + "who made it?", PICTURE, ignore_eos=True).wait()
        assert alone.tokens == second.tokens
        assert alone.last.timings.ttft_s >= alone.last.timings.picture_s > 0


@pytest.mark.parametrize("family", ["mistral3", "qwen35"])
def test_what_is_cached_never_ends_inside_a_picture(monkeypatch: Patch, texts: Texts, family: str) -> None:
    """Two texts with pictures that begin alike, and a picture of which a part is computed."""
    path, spatial = texts(family), family == "qwen35"
    encoder = LinearEncoder(WIDTH, spatial)
    with seeing(monkeypatch, path, encoder) as engine:
        first = ask(engine, f"{LONG}{MARK}", PICTURE).wait()  # the last token of a prompt is computed again
        steps = steps_of(engine)
        again = ask(engine, f"{LONG}{MARK}", PICTURE).wait()
        assert again.tokens == first.tokens
        assert steps[0] == [(ROWS, True)] or not steps[0][0][1]
        assert again.last.usage.cached_tokens <= again.last.usage.prompt_tokens - ROWS
        other = ask(engine, f"{LONG}{MARK}", drawn(48, 32, 9)).wait()
        assert 16 <= other.last.usage.cached_tokens <= other.last.usage.prompt_tokens - ROWS
    assert len(encoder.encoded) == 2


def test_guesses(monkeypatch: Patch, texts: Texts) -> None:
    """Speculation changes nothing, and never guesses a row of a picture."""
    path = texts("qwen35")
    text = f"one two three {MARK} one two three {MARK} one two three"
    expected = said(path, LinearEncoder(WIDTH), text, PICTURE, PICTURE, n=40)
    with seeing(monkeypatch, path, LinearEncoder(WIDTH), spec="lookup") as engine:
        answer = ask(engine, text, PICTURE, PICTURE, ignore_eos=True, max_tokens=40).wait()
    assert answer.tokens == expected


def test_several_at_once(monkeypatch: Patch, texts: Texts) -> None:
    """Different pictures in one batch, beside a text."""
    path, encoder = texts("qwen35"), LinearEncoder(WIDTH)
    pictures = [drawn(48, 32, seed) for seed in range(3)]
    text = f"Look at {MARK} and say"
    expected = [said(path, LinearEncoder(WIDTH), text, picture) for picture in pictures]
    with seeing(monkeypatch, path, encoder) as engine:
        alone = ask(engine, "Say", ignore_eos=True).wait().tokens
        steps = steps_of(engine)
        found = engine.call(
            lambda _: [
                ask(engine, "Say", ignore_eos=True),
                *(ask(engine, text, p, ignore_eos=True) for p in pictures),
            ]
        )
        assert [answer.wait().tokens for answer in found] == [alone, *expected]
    assert any(len(step) > 2 for step in steps)


def test_echo_penalties_and_refusals(monkeypatch: Patch, texts: Texts) -> None:
    path = texts("qwen35")
    with seeing(monkeypatch, path, LinearEncoder(WIDTH), ctx=128) as engine:
        penalised = ask(engine, f"See {MARK}!", PICTURE, repeat_penalty=1.5, dry_multiplier=1.0).wait()
        assert penalised.last.kind == "done"
        error = ask(engine, f"See {MARK}!", PICTURE, prompt_logprobs=1).wait().last.error
        assert isinstance(error, OptionError)
        error = ask(engine, f"See {MARK}{LONG}", drawn(96, 96)).wait().last.error
        assert isinstance(error, ContextFull)
        answer = ask(engine, f"See {MARK}!")  # without a picture it is a text like any other
        assert answer.wait().last.kind == "done"
        error = ask_file(engine, f"See {MARK}!", file_of(PICTURE)[:-1]).wait().last.error
        assert isinstance(error, PictureError)


def test_cancel_while_it_is_encoded(monkeypatch: Patch, texts: Texts) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go_on.wait(30)

    encoder = LinearEncoder(WIDTH, before=wait)
    with seeing(monkeypatch, texts("qwen35"), encoder) as engine:
        answer = ask(engine, f"See {MARK}", PICTURE)
        assert inside.wait(30)
        doing = engine.doing
        assert doing is not None
        assert doing.what == "a picture"
        engine.cancel(answer.id)
        assert encoder.cancelled.is_set()
        go_on.set()
        assert answer.wait().last.finish_reason == "cancelled"
        assert not encoder.encoded
        inside.clear()
        assert ask(engine, f"See {MARK}", PICTURE).wait().last.kind == "done"


def test_the_budget(monkeypatch: Patch, texts: Texts) -> None:
    """A picture that does not fit is refused, one that does is in the bill, and all is given back."""
    encoder = LinearEncoder(WIDTH, nbytes=8 << 20)
    with seeing(monkeypatch, texts("qwen35"), encoder, ctx=2048) as engine:
        store = engine.call(lambda loaded: loaded.pictures)
        assert store is not None
        assert ask(engine, f"See {MARK}", PICTURE).wait().last.kind == "done"
        bill = engine.call(lambda loaded: loaded.model.bill())
        assert bill[breakdown.PICTURES] == (8 << 20) + 4 * ROWS * WIDTH
        assert bill[breakdown.LEFT] >= 0

        def limit(loaded: LoadedModel) -> None:
            model = loaded.model
            assert isinstance(model, PlannedModel)
            model.rest()
            least = sum(n for k, n in model.bill().items() if k not in ("limit", "left", breakdown.KV))
            model.set_ram(least + model.kv.least_bytes + (4 << 20))

        engine.call(limit)
        encoder.more = 1 << 30
        error = ask(engine, f"See {MARK}", drawn(64, 64, 5)).wait().last.error
        assert isinstance(error, BudgetError)
        assert "there is no room for a picture of 64 x 64" in str(error)
        assert "1.0 GiB are needed beside the model" in str(error)
        encoder.more = 0
        assert ask(engine, f"See {MARK}", PICTURE).wait().last.kind == "done"
        monkeypatch.setattr("hetrun.engine.pictures.store.IDLE_S", 0.0)
        engine.call(lambda loaded: loaded.pictures and loaded.pictures.rest())
        assert encoder.closed == 1
        bill = engine.call(lambda loaded: loaded.model.bill())
        assert bill[breakdown.PICTURES] == 4 * ROWS * WIDTH


def test_rows_that_had_to_go(monkeypatch: Patch, texts: Texts) -> None:
    """Rows and pixels for which there is no room are made again, and the answer is the same."""
    path, text = texts("qwen35"), f"{MARK} or {MARK} or {MARK}?"
    pictures = [drawn(48, 32, seed) for seed in range(3)]
    expected = said(path, LinearEncoder(WIDTH), text, *pictures)
    monkeypatch.setattr("hetrun.engine.pictures.store.MOST_ROWS", 1)
    monkeypatch.setattr("hetrun.engine.pictures.store.MOST_KEYS", 1)
    encoder = LinearEncoder(WIDTH)
    with seeing(monkeypatch, path, encoder) as engine:
        assert ask(engine, text, *pictures, ignore_eos=True).wait().tokens == expected
    assert encoder.encoded == [picture.digest for picture in pictures]


def test_no_encoder(texts: Texts) -> None:
    encoder = LinearEncoder(2 * WIDTH)
    with opened(texts("qwen35"), vision_of(encoder)) as engine:
        error = ask(engine, f"See {MARK}", PICTURE).wait().last.error
        assert isinstance(error, OptionError)
        assert "belongs to another model" in str(error)


def test_computed_again(monkeypatch: Patch, texts: Texts) -> None:
    """A request that gave its place up in the middle of its answer, and nothing of it was kept."""
    path, text = texts("qwen35"), f"{MARK}What is on this picture, and why?"
    expected = said(path, LinearEncoder(WIDTH), text, PICTURE, n=30)
    with seeing(monkeypatch, path, LinearEncoder(WIDTH)) as engine:
        loop = engine._loop
        assert loop is not None
        answer = Answer()
        gone = threading.Event()

        def heard(event: Event) -> None:
            if len(answer.events) == 12:

                def give_up(loaded: LoadedModel) -> None:
                    loop.requests.places.give_up(loop.requests.running[0])
                    assert loaded.prefixes is not None
                    loaded.prefixes.clear()
                    gone.set()

                threading.Thread(target=engine.call, args=(give_up,)).start()
            answer(event)

        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        engine.submit(GenerateRequest(params, text=text, pictures=(file_of(PICTURE),)), heard)
        assert answer.wait().tokens == expected
        assert gone.wait(30)


def test_a_file_of_prompts(monkeypatch: Patch, texts: Texts, tmp_path: Path) -> None:
    """Another process begins after a picture whose prompt was saved, without an encoder."""
    path, begin, file = texts("mistral3"), f"{LONG}{MARK} so ", tmp_path / "prompts"
    with seeing(monkeypatch, path, LinearEncoder(WIDTH, spatial=False)) as engine:
        ask(engine, begin + "what", PICTURE).wait()
        expected = ask(engine, begin + "who", PICTURE, ignore_eos=True).wait().tokens
        assert engine.call(lambda loaded: loaded.prompts and loaded.prompts.save(file))
    encoder = LinearEncoder(WIDTH, spatial=False)
    with seeing(monkeypatch, path, encoder) as engine:
        assert engine.call(lambda loaded: loaded.prompts and loaded.prompts.load(file))
        found = ask(engine, begin + "who", PICTURE, ignore_eos=True).wait()
        assert found.tokens == expected
        assert found.last.usage.cached_tokens > ROWS
        assert not encoder.encoded


def test_a_chat(monkeypatch: Patch, texts: Texts) -> None:
    """Messages: the picture stands where its part does, next to texts without a new line, over two turns."""
    path, encoder = texts("qwen35"), LinearEncoder(WIDTH)
    parts = [{"type": "text", "text": "Look"}, {"type": "image"}, {"type": "text", "text": "what?"}]
    messages = ({"role": "user", "content": parts}, {"role": "assistant", "content": "it"})
    turn = f"<|im_start|>user\nLook{MARK}what?<|im_end|>\n<|im_start|>assistant\nit<|im_end|>\n"
    text = f"{turn}<|im_start|>user\n{MARK}<|im_end|>\n<|im_start|>assistant\n"
    pictures = (PICTURE, drawn(24, 24, 5))
    expected = said(path, LinearEncoder(WIDTH), text, *pictures)
    with seeing(monkeypatch, path, encoder) as engine:
        answer = Answer()
        all_of_it = (*messages, {"role": "user", "content": [{"type": "image"}]})
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        files = tuple(map(file_of, pictures))
        engine.submit(GenerateRequest(params, messages=all_of_it, pictures=files), answer)
        assert answer.wait().tokens == expected


class Blind(InterpretingBackend):
    """The reference, without passes in which rows see each other."""

    def __init__(self) -> None:
        super().__init__("blind", TABLE)

    def supports(self, op: Op) -> bool:
        return super().supports(op) and not (self.whole and isinstance(op.attrs, Attention))


def test_backends_that_do_not_see_whole_pictures(monkeypatch: Patch, texts: Texts) -> None:
    """They leave attention to others and the plan says so; where there are no others, they run texts."""
    path = texts("gemma3")
    undo = registry.register(Descriptor("blind", lambda: Available("a test"), Blind, preference=200))
    try:
        for names, attends in ((("blind", "llamacpp"), "llamacpp"), (("blind",), "blind")):
            plans = predict_plans(open_model(path), Options(Wishes(), names, planner="static", whole=True))
            ops = [(s.backend, op) for s in plans.plan(64).segments for op in s.ops]
            assert {backend for backend, op in ops if isinstance(op.attrs, Attention)} == {attends}
            assert any("blind cannot compute" in note for note in plans.notes) == (attends != "blind")
        encoder = LinearEncoder(WIDTH, spatial=False, whole=True)
        with seeing(monkeypatch, path, encoder, backends="blind") as engine:
            error = ask(engine, f"See {MARK}!", PICTURE).wait().last.error
            assert isinstance(error, OptionError)
            assert "the backend blind cannot read the pictures of this model" in str(error)
            assert ask(engine, "See!").wait().last.kind == "done"
    finally:
        undo()
