"""The block inside a model's file that predicts one more token: what it computes, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hetrun import LLM, SamplingParams
from hetrun.engine.speculation.mtp import REACH, MtpSequence
from hetrun.errors import HetrunError, ModelFileError, OptionError
from hetrun.executor.mtp import Guess, Predictor
from hetrun.executor.plan_prediction import predict_plans
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.graph import Graph
from hetrun.loader.architectures import prediction_block
from hetrun.loader.open_model import open_model
from hetrun.planner.options import Options, Wishes
from hetrun.system.estimate import TrackedEstimate
from hetrun.tools.evaluate import compare
from tests.models import hf, tiny
from tests.models.mtp_blocks import FAMILIES, PLAIN, published

TOKENS = tiny.random_tokens(40)
Asked = tuple[list[int], list[int]]  # a text, and what the block said to it
FLIPS = 1  # rows of 40 whose choice of an expert may be another one in llama.cpp
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture
def folder() -> Path:
    return published("qwen35").folder


@pytest.fixture(params=["folder-reference", "folder-llamacpp", "file-llamacpp"])
def opened(request: pytest.FixtureRequest, family: str) -> Iterator[PlannedModel]:
    form, backend = request.param.split("-")
    options = Options(Wishes(), backends=(backend,), planner="static", kv_type="f32", mtp="on")
    it = published(family)
    found = PlannedModel(open_model(it.folder if form == "folder" else it.file), options)
    yield found
    found.close()


def predictor_of(model: PlannedModel) -> Predictor:
    assert model.predictor is not None
    return model.predictor


def hidden_of(model: PlannedModel, tokens: list[int]) -> np.ndarray:
    """The hidden state of each token."""
    seq = model.alloc()
    ids = np.array(tokens, np.int64)
    model.step(Step((Chunk(seq, ids, np.array([len(ids) - 1]), hidden=len(ids)),)))
    model.free(seq)
    return model.hidden.copy()


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_the_published_block_does(opened: PlannedModel, family: str) -> None:
    model, block, *_ = published(family)
    predictor, hidden = predictor_of(opened), hidden_of(opened, TOKENS)
    with torch.no_grad():
        words = model.get_input_embeddings()
        before = model.model(torch.tensor([TOKENS])).last_hidden_state
        assert np.abs(hidden - before[0].numpy()).max() < 1e-3
        fed, thoughts = words(torch.tensor([TOKENS[1:]])), before[:, :-1]
        seq = predictor.alloc()
        new, rows = TOKENS[1:], hidden[:-1]
        for _ in range(3):
            after = block(fed, thoughts)
            guess = predictor.guess(seq, new, rows)
            assert np.abs(guess.hidden[0] - after[0, -1].numpy()).max() < 1e-3
            assert guess.token == int(model.lm_head(after[0, -1]).argmax())
            # It goes on from its own guess and its own thought.
            new, rows = [guess.token], guess.hidden
            fed = torch.cat([fed, words(torch.tensor([new]))], 1)
            thoughts = torch.cat([thoughts, after[:, -1:]], 1)
        assert predictor.keep(seq, len(TOKENS) - 1)
        again = predictor.guess(seq, [5], hidden[-1:])
        end = torch.cat([words(torch.tensor([[*TOKENS[1:], 5]]))], 1)
        after = block(end, before)
        assert np.abs(again.hidden[0] - after[0, -1].numpy()).max() < 1e-3
        predictor.free(seq)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_the_same_with_and_without_it(family: str) -> None:
    _, _, folder, file = published(family)
    with LLM(hf.folder(FAMILIES[family].row), backends=["llamacpp"], kv_type="f32") as llm:
        plain = llm.logits(TOKENS)
    for path, most in ((folder, 0.0), (file, 1e-4)):
        with LLM(path, backends=["llamacpp"], kv_type="f32", spec="mtp") as llm:
            assert np.abs(llm.logits(TOKENS) - plain).max() <= most
    with LLM(file, backends=["libllama"], kv_type="f32") as llm:
        theirs = llm.logits(TOKENS)
    off = sorted(compare([ours[None]], [row[None]]).mean_kl for ours, row in zip(plain, theirs, strict=True))
    # Its products round otherwise on each CPU, which may flip a choice between experts that are liked alike.
    assert off[-1 - FLIPS] < 1e-4


def right(every: int) -> tuple[Callable[[MtpSequence, int], list[int]], list[Asked]]:
    """A guesser whose guesses are the text's, but for one in `every`; what it does besides is real."""
    real = MtpSequence.propose
    asked: list[Asked] = []

    def propose(mine: MtpSequence, n: int) -> list[int]:
        asked.append((list(mine._tokens), real(mine, n)))
        at = len(mine._tokens)
        return [
            TEXT[at + i] if (at + i) % every else TEXT[at + i] ^ 1 for i in range(n) if at + i < len(TEXT)
        ]

    return propose, asked


TEXT: list[int] = []


@pytest.mark.parametrize("every", [2, 3, 1000])
def test_the_same_tokens_and_guesses_from_what_the_model_thought(
    folder: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    options: dict[str, Any] = {"backends": ["llamacpp"], "kv_type": "f32", "ctx": 128, "planner": "static"}
    with LLM(folder, spec="off", **options) as llm:
        plain = llm.generate([TOKENS[:20]], GREEDY)[0].tokens
    TEXT[:] = [*TOKENS[:20], *plain, *range(100, 120)]
    propose, asked = right(every)
    monkeypatch.setattr(MtpSequence, "propose", propose)
    monkeypatch.setattr("hetrun.engine.speculation.mtp.AcceptanceRates.chances", lambda mine, n: [0.99] * n)
    with LLM(folder, spec="mtp", **options) as llm:
        found = llm.generate([TOKENS[:20]], GREEDY)[0]
    assert found.tokens == plain
    assert found.timings.drafted >= found.timings.accepted
    assert asked
    if every == 1000:
        assert found.timings.accepted > 5
    # Each guess was made of the hidden states of all tokens but the last, whatever was taken back meanwhile.
    model = PlannedModel(
        open_model(folder),
        Options(Wishes(), backends=("llamacpp",), planner="static", kv_type="f32", mtp="on", ctx=128),
    )
    predictor = predictor_of(model)
    for tokens, guesses in asked:
        hidden, seq = hidden_of(model, tokens), predictor.alloc()
        guess = predictor.guess(seq, tokens[1:], hidden[:-1])
        assert guess.token == guesses[0]
        predictor.free(seq)
    model.close()


def test_two_that_may_ask_and_one_place() -> None:
    class Fake:
        context, about_s = 1000, 0.001

        def __init__(self) -> None:
            self.open = set[int]()

        @property
        def has_place(self) -> bool:
            return not self.open

        def alloc(self) -> int:
            assert self.has_place
            self.open.add(1)
            return 1

        def free(self, seq: int) -> None:
            self.open.remove(seq)

        def guess(self, seq: int, tokens: list[int], before: np.ndarray) -> Guess:
            return Guess(7, np.zeros((1, 4), np.float32))

    fake = Fake()
    first, second = (MtpSequence(cast(Predictor, fake), [1, 2, 3], TrackedEstimate(1.0)) for _ in range(2))
    for one in (first, second):
        one.observe(0, np.zeros((2, 4), np.float32))
    assert first.may_ask(1)
    assert second.may_ask(1)
    assert first.propose(1) == [7]
    assert second.propose(1) == []  # in the same step
    first.close()
    assert second.propose(1) == [7]


def test_what_it_reads_is_bounded_and_begins_anew_after_a_gap() -> None:
    calls: list[tuple[int, int, list[int]]] = []

    class Fake:
        context, has_place, about_s = 1000, True, 0.001

        def __init__(self) -> None:
            self.next, self.open = 0, set[int]()

        def alloc(self) -> int:
            self.next += 1
            self.open.add(self.next)
            return self.next

        def free(self, seq: int) -> None:
            self.open.remove(seq)

        def keep(self, seq: int, n: int) -> bool:
            calls.append((seq, n, []))
            return True

        def guess(self, seq: int, tokens: list[int], before: np.ndarray) -> Guess:
            assert len(tokens) == len(before)
            assert before[:, 0].tolist() == [t - 1 for t in tokens], "each with the one before it"
            calls.append((seq, -1, list(tokens)))
            # Its own thought of a token has that token's number, as the model's here.
            return Guess(tokens[-1] + 1, np.full((1, 4), tokens[-1], np.float32))

    def rows(a: int, b: int) -> np.ndarray:
        return np.repeat(np.arange(a, b, dtype=np.float32)[:, None], 4, 1)

    fake, tokens = Fake(), list(range(300))
    mine = MtpSequence(cast(Predictor, fake), tokens, TrackedEstimate(1.0))
    assert not mine.may_ask(1)
    mine.observe(0, rows(0, 200))
    assert not mine.may_ask(1), "the last ones are not there yet"
    mine.observe(200, rows(200, 299))
    assert mine.may_ask(1)
    assert mine.propose(2) == [300, 301]
    assert calls[0] == (1, -1, list(range(300 - REACH, 300)))
    tokens += [300, 301, 302]
    mine.observe(299, rows(299, 302))
    calls.clear()
    assert mine.propose(1) == [303]
    assert calls == [(1, REACH, []), (1, -1, [300, 301, 302])]
    tokens += range(303, 600)  # not asked for a while: what it has not seen is too far back
    mine.observe(302, rows(302, 599))
    calls.clear()
    mine.propose(1)
    assert calls == [(2, -1, list(range(600 - REACH, 600)))]
    assert fake.open == {2}
    mine.observe(700, rows(700, 710))  # a gap: what was before it says nothing of it
    assert not mine.may_ask(1)
    mine.close()
    assert not fake.open


def test_asked_for_by_name_and_not_there() -> None:
    with pytest.raises(OptionError, match="no block that predicts further tokens"):
        LLM(hf.folder(PLAIN), backends=["llamacpp"], spec="mtp")


def test_the_bill_has_it_and_auto_goes_without_where_memory_is_short(folder: Path) -> None:
    def bill(mtp: Literal["off", "auto", "on"], ram: int | None = None) -> dict[str, int]:
        options = Options(Wishes(), backends=("llamacpp",), ctx=128, ram=ram, mtp=mtp, besides={"x": 0})
        return dict(predict_plans(open_model(folder), options).memory)

    without, with_it = bill("off"), bill("auto")
    assert "MTP block" not in without
    size = with_it["MTP block"]
    weights = sum(w.nbytes for w in prediction_graph(folder).weights().values())
    assert size >= weights
    parts = ("weights", "KV of one full sequence", "graphs and scratch")
    enough = sum(without[part] for part in parts) + 1000
    assert "MTP block" not in bill("auto", enough)
    assert bill("on", enough + size)["MTP block"] == size


def prediction_graph(path: Path) -> Graph:
    found = prediction_block(open_model(path))
    assert found is not None
    return found.graph


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("mtp.fc.weight", (128, 128), "nextn.eh_proj.weight is 128 x 128, but the settings say 128 x 256"),
        ("mtp.pre_fc_norm_hidden.weight", (64,), "nextn.hnorm.weight is 1 x 64"),
        ("mtp.layers.0.self_attn.q_proj.weight", (64, 128), "attn_q.weight is 64 x 128"),
        ("mtp.norm.weight", None, "mtp.norm|nextn.norm"),
        ("mtp.layers.0.mlp.up_proj.weight", None, "mlp.up_proj"),
    ],
)
def test_blocks_that_are_damaged(
    folder: Path, tmp_path: Path, name: str, shape: tuple[int, ...] | None, said: str
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop(name)
    if shape:
        weights[name] = torch.zeros(shape)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HetrunError, match=said) as caught:
        prediction_block(open_model(tmp_path))
    assert isinstance(caught.value, ModelFileError)
