"""`hetrun bench --text`: both sides read and write the same stretches of a text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetrun.api.local_model import LocalModel
from hetrun.client.events import Event, GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings
from hetrun.errors import OptionError, UserError
from hetrun.executor.stats import Stats
from hetrun.tools import bench
from hetrun.tools.bench import interleave, matmul_peak
from hetrun.tools.bench.cases import BenchCase, BenchOptions
from hetrun.tools.bench.hetrun_side import HetrunSide, Watch
from hetrun.tools.bench.llamacpp_peer import Order, RunPeerCase
from hetrun.tools.bench.memory_bandwidth import MemoryBandwidth
from hetrun.tools.bench.options import TypedBenchOptions, options_of
from hetrun.tools.bench.peer import MappedPeer, Peer
from hetrun.tools.bench.process import BenchProcess
from hetrun.tools.bench.sweep.budgets import SweepOptions
from hetrun.tools.bench.texts import BenchText, TextOrigin, open_text
from tests.models import tiny
from tests.models.tiny import TinyLlama

MODEL = TinyLlama("text", layers=1, kv_heads=2)
WORDS = "".join(f"{i} bottles of beer on the wall; take one down and pass it around. " for i in range(99))
CASES = st.builds(
    BenchCase,
    st.sampled_from(["prefill", "decode"]),
    st.integers(1, 40),
    st.integers(0, 40),
    st.integers(1, 4),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(MODEL, tmp_path_factory.mktemp("text") / "tiny.gguf")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("words") / "words.txt"
    file.write_text(WORDS, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def text(path: Path, words: Path) -> BenchText:
    found = open_text(settings(path), words)
    assert found is not None
    return found


def settings(path: Path, **given: Any) -> Settings:  # noqa: ANN401 - those of Settings
    return Settings.resolve(environ={}, model=str(path), backends=["reference"], threads=1, **given)


def numbered(n: int) -> BenchText:
    """A text in which each token says where it stands."""
    return BenchText(TextOrigin("numbers", "0" * 64, n), np.arange(n, dtype=np.int32))


# --- which stretches


@given(CASES, st.integers(-4, 20), st.integers(200, 5000))
def test_an_answer_is_what_follows_the_prompt_in_the_text(case: BenchCase, seed: int, n: int) -> None:
    found = numbered(n).passage(case, seed)
    assert found.prompts.shape == (case.batch, case.prompt)
    for prompt, answer in zip(found.prompts, found.answers, strict=True):
        row = np.concatenate([prompt, answer])
        assert ((row[1:] - row[:-1]) % n == 1).all()
    if case.kind == "decode":
        assert found.answers.shape[1] > case.tokens
        # A sample that writes less begins at the same place.
        assert (numbered(n).passage(replace(case, tokens=1), seed).prompts == found.prompts).all()
    else:
        assert found.answers.size == 0


@pytest.mark.parametrize("batch", [1, 3])
def test_rounds_sequences_and_lengths_begin_at_places_of_their_own(batch: int) -> None:
    text, kinds = (
        numbered(100_000),
        [BenchCase("prefill", 512), BenchCase("prefill", 128), BenchCase("decode", 64, 512)],
    )
    begins = [
        int(row[0])
        for case in kinds
        for seed in range(8)
        for row in text.passage(replace(case, batch=batch), seed).prompts
    ]
    assert len(set(begins)) == len(begins) == 3 * 8 * batch
    assert max(begins) > 90_000
    assert min(begins) < 10_000


def test_a_text_that_is_too_short_is_refused() -> None:
    text, case = numbered(20), BenchCase("decode", 8, 11)
    text.check(case)
    with pytest.raises(
        OptionError, match=r"tg9@11 needs a text of 21 tokens.* and numbers has 20; give a lon"
    ):
        text.check(replace(case, tokens=9))


def test_a_text_is_opened_with_the_models_tokenizer(path: Path, words: Path, text: BenchText) -> None:
    with LocalModel(path, backends=["reference"]) as llm:
        assert llm.tokenize(WORDS)[-len(text.ids) :] == text.ids.tolist()
    digest = hashlib.sha256(words.read_bytes()).hexdigest()
    assert text.about.to_json() == {"name": "words.txt", "sha256": digest, "tokens": len(text.ids)}
    assert text.about.told.startswith(f"text: words.txt, {len(text.ids)} tokens (sha256 {digest[:12]})")
    assert open_text(settings(path), None) is None
    with pytest.raises(UserError, match=r"nothing\.txt: No such file.* give a text file with --text"):
        open_text(settings(path), words.parent / "nothing.txt")


# --- our side


def forced(llm: LocalModel, script: list[int], **sampling: Any) -> list[int]:  # noqa: ANN401 - those of SamplingParams
    """The tokens of an answer that is to begin with these."""
    found: list[int] = []

    def on_event(event: Event) -> None:
        if event.kind == "token" and event.token is not None:
            found.append(event.token)
        watch(event)

    watch = (w := Watch(Stats(), 1, 6)).collector(0)
    llm.submit(GenerateRequest(SamplingParams(**sampling), tokens=(1, 2, 3), forced=tuple(script)), on_event)
    w.wait()
    return found


@pytest.mark.parametrize("spec", ["off", "lookup"])
def test_an_answer_is_forced_and_goes_on_by_itself(path: Path, spec: str) -> None:
    with LocalModel(path, backends=["reference"], spec=spec) as llm:
        greedy: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        script = [7, 8, 9, 7, 8, 9]
        assert forced(llm, script, **greedy) == script
        assert forced(llm, script, **(greedy | {"temperature": 1.0})) == script
        # Behind the script the model says what it would say to such a beginning.
        on = llm.generate([1, 2, 3, 7, 8, 9], SamplingParams(**(greedy | {"max_tokens": 3})))[0].tokens
        assert forced(llm, script[:3], **greedy) == [*script[:3], *on]
        with pytest.raises(OptionError, match="token 99999 of the answer is not in the vocabulary"):
            forced(llm, [99999], **greedy)


@pytest.mark.parametrize("batch", [1, 3])
def test_our_side_reads_and_writes_the_text(
    path: Path, text: BenchText, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    case, asked, said = BenchCase("decode", 6, 8, batch), [], []
    real = LocalModel.submit

    def submit(llm: LocalModel, request: GenerateRequest, on_event: Callable[[Event], None]) -> int:
        mine: list[int] = []
        asked.append(request.tokens)
        said.append(mine)

        def noted(event: Event) -> None:
            if event.kind == "token" and event.token is not None:
                mine.append(event.token)
            on_event(event)

        return real(llm, request, noted)

    monkeypatch.setattr(LocalModel, "submit", submit)
    with LocalModel(path, backends=["reference"], ubatch=16) as llm:
        ours = HetrunSide(llm, text=text)
        ours.prepare(case)
        asked.clear()
        said.clear()
        assert ours.sample(case, 1) > 0
    passage = text.passage(case, 1)
    assert asked == [tuple(row) for row in passage.prompts.tolist()]
    for mine, row in zip(said, passage.answers.tolist(), strict=True):
        assert mine == row[: len(mine)]
        assert len(mine) >= (case.tokens + 1 if batch == 1 else 1)


# --- the peer


def test_the_peer_gets_the_same_tokens(path: Path, text: BenchText, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[RunPeerCase] = []
    real = BenchProcess.send

    def send(process: BenchProcess, order: object) -> None:
        if isinstance(order, RunPeerCase):
            sent.append(order)
        real(process, order)

    monkeypatch.setattr(BenchProcess, "send", send)
    case = BenchCase("decode", 4, 8)
    with Peer(path, 1, text=text) as peer:
        peer.prepare(case)
        assert peer.sample(case, 1, 0) == 0.0  # nothing but the prompt
        assert 0 < peer.sample(case, 1) < 1e6
        peer.prepare(BenchCase("prefill", 24, 0, 2))
        assert 0 < peer.sample(BenchCase("prefill", 24, 0, 2), 1) < 1e6
    runs = [run for run in sent if run.case == case]
    assert runs[-1].text is not None
    assert (runs[-1].text.prompts == text.passage(case, 1).prompts).all()
    assert (runs[-1].text.answers == text.passage(case, 1).answers).all()


@pytest.mark.parametrize(("mapped", "seeds"), [(MappedPeer((), "f16"), True), (None, False)])
def test_trials_in_little_memory_have_a_part_of_the_text_each(
    path: Path, text: BenchText, monkeypatch: pytest.MonkeyPatch, mapped: MappedPeer | None, seeds: bool
) -> None:
    tried: list[RunPeerCase] = []

    def ask(peer: Peer, order: Order, kind: type) -> object:
        if isinstance(order, RunPeerCase):
            tried.append(order)
            return 1.0
        return real(peer, order, kind)

    real = Peer._ask
    with Peer(path, None, mapped, text) as peer:
        monkeypatch.setattr(Peer, "_ask", ask)
        peer.prepare(BenchCase("decode", 4, 8))
    assert {run.seed for run in tried} == ({0} | {-run.threads for run in tried} if seeds else {0})


# --- how it is asked for, and all of it together

ASKED = TypedBenchOptions(None, "64", None, None, 5, None, False, None, None, None, None, "table")


def test_the_option_is_for_runs_in_process_and_for_sweeps() -> None:
    asked = replace(ASKED, text=Path("a.txt"))
    in_process, sweep = options_of(asked), options_of(replace(asked, ram="50%"))
    assert isinstance(in_process, BenchOptions)
    assert isinstance(sweep, SweepOptions)
    assert in_process.text == sweep.text == Path("a.txt")
    with pytest.raises(OptionError, match="--text is for runs in process"):
        options_of(replace(asked, clients="4"))


def test_bench_of_a_text_against_llama_cpp(
    path: Path,
    words: Path,
    text: BenchText,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interleave, "PAUSE_S", 0.0)
    monkeypatch.setattr(
        bench, "memory", lambda n, nbytes, again=True: MemoryBandwidth(n, int(nbytes), 2e9 * n, 1e9 * n)
    )
    monkeypatch.setattr(matmul_peak, "WIDTH", 256)
    monkeypatch.setattr(matmul_peak, "TOKENS", 16)
    options = BenchOptions((16,), (4,), (8,), (1, 2), 2, "llama.cpp", output="json", text=words)
    bench.main(settings(path, precision="fast"), options)
    found = json.loads(capsys.readouterr().out)
    assert [row["text"] for row in found] == [text.about.to_json()] * 4
    assert all(len(row["samples"]) == len(row["peer"]["samples"]) == 2 for row in found)
    bench.main(settings(path, precision="fast"), replace(options, vs=None, output="table", batch=(1,)))
    assert capsys.readouterr().out.count(text.about.told) == 1
    with pytest.raises(OptionError, match="pp60000 needs a text of 60001 tokens"):
        bench.main(settings(path), replace(options, prompt=(60_000,)))
