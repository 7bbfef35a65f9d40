"""`hetrun eval`: perplexity, KL and agreement, and where the logits for them come from."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetrun.api.local_model import LocalModel
from hetrun.backend import Floats
from hetrun.config import Settings
from hetrun.errors import OptionError, UserError
from hetrun.executor.loading.memory_estimates import MAX_SEQUENCES
from hetrun.executor.stats import Stats, TimeKey
from hetrun.tools import evaluate
from hetrun.tools.evaluate import (
    EvalOptions,
    EvaluationReport,
    LogitComparison,
    Perplexity,
    compare,
    log_softmax,
    logits,
    perplexity,
    rows_of_all,
)
from tests.models import tiny
from tests.models.tiny import TinyLlama
from tests.support.tiers import first

MODEL = TinyLlama("eval", layers=2, kv_heads=2, quant="Q8_0")
TEXT = "the rain on the hill, and then the rain in the inn. " * 6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(MODEL, tmp_path_factory.mktemp("eval") / "tiny.gguf")


def pieces(rows: Floats, *sizes: int) -> Iterator[Floats]:
    for size in sizes:
        yield rows[:size]
        rows = rows[size:]
    yield rows


def drawn(seed: int, rows: int = 100, width: int = 50) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, width), np.float32) * 3


def test_log_softmax_is_exact_far_from_zero() -> None:
    found = log_softmax(np.array([[1e4, 1e4 - 1, -1e4]], np.float32))
    assert found.dtype == np.float64
    assert np.exp(found).sum() == pytest.approx(1, abs=1e-15)
    assert found[0, 0] == pytest.approx(-np.log1p(np.exp(-1)), abs=1e-15)
    assert found[0, 2] == pytest.approx(-2e4, rel=1e-4)


def test_closeness_is_what_the_definition_says() -> None:
    a, b = drawn(1), drawn(1) + drawn(2) * 0.2
    p = np.exp(a.astype(np.float64)) / np.exp(a.astype(np.float64)).sum(-1, keepdims=True)
    q = np.exp(b.astype(np.float64)) / np.exp(b.astype(np.float64)).sum(-1, keepdims=True)
    kl = (p * np.log(p / q)).sum(-1)
    found = compare(pieces(a, 7, 60), pieces(b, 40))
    assert found.mean_kl == pytest.approx(kl.mean(), rel=1e-12)
    assert found.p99_kl == pytest.approx(np.quantile(kl, 0.99), rel=1e-12)
    assert found.top1 == np.mean(a.argmax(-1) == b.argmax(-1)) < 1
    # It is not symmetric: the first is the truth.
    assert compare([b], [a]).mean_kl != pytest.approx(found.mean_kl, rel=1e-3)


def test_a_run_is_as_close_as_can_be_to_itself() -> None:
    found = compare([drawn(3)], [drawn(3) + np.float32(0)])
    assert (found.mean_kl, found.p99_kl, found.top1) == (0.0, 0.0, 1.0)


def test_perplexity_is_what_the_definition_says() -> None:
    rows, tokens = drawn(4), np.random.default_rng(5).integers(0, 50, 100).tolist()
    expected = np.exp(-np.mean([log_softmax(rows)[i, tokens[i + 1]] for i in range(99)]))
    assert perplexity(pieces(rows, 33, 1), tokens) == pytest.approx(expected, rel=1e-12)
    assert perplexity([np.zeros((100, 50), np.float32)], tokens) == pytest.approx(50)


def test_missing_rows_are_noticed() -> None:
    with pytest.raises(ValueError, match="99 rows of logits for 100 tokens"):
        perplexity([drawn(4, rows=99)], [0] * 100)
    with pytest.raises(ValueError, match="more rows than the other"):
        compare(pieces(drawn(1), 10), [drawn(1, rows=99)])


def test_only_a_few_rows_are_compared_at_once() -> None:
    sizes = [
        len(a) for a, b in rows_of_all([drawn(1, rows=70)], pieces(drawn(2, rows=70), 40)) if len(a) == len(b)
    ]
    assert sizes == [32, 8, 30]


def test_adding_in_pieces_changes_nothing() -> None:
    whole, parts = LogitComparison(), LogitComparison()
    whole.add(drawn(1), drawn(2))
    for a, b in rows_of_all([drawn(1)], [drawn(2)]):
        parts.add(a, b)
    assert parts.result() == whole.result()
    perplexities = Perplexity(range(50)), Perplexity(range(50))
    perplexities[0].add(drawn(1, rows=50))
    for piece in pieces(drawn(1, rows=50), 1, 48):
        perplexities[1].add(piece)
    assert perplexities[0].result() == pytest.approx(perplexities[1].result(), rel=1e-14)


@pytest.mark.parametrize("ubatch", [None, 1, 7, 100])
def test_logits_come_in_pieces(path: Path, ubatch: int | None) -> None:
    tokens = tiny.random_tokens(150)
    with LocalModel(path, backends=["reference"], ubatch=ubatch, kv_type="f32") as llm:
        found = np.concatenate(list(logits(llm, tokens)))
        assert np.abs(found - llm.logits(tokens)).max() < 1e-4


def test_logits_that_are_not_read_to_the_end_leave_nothing_behind(path: Path) -> None:
    tokens = tiny.random_tokens(64)
    with LocalModel(path, backends=["reference"], ctx=64) as llm:
        for _ in range(MAX_SEQUENCES + 2):  # one more than there is room for
            with closing(logits(llm, tokens)) as pieces:
                assert len(next(pieces)) == 64


@pytest.mark.parametrize("against", ["reference", "llama.cpp"])
def test_evaluate_gives_a_report(path: Path, against: str) -> None:
    found = evaluate.evaluate(path, TEXT, against, tokens=96, backends=["reference"], kv_type="f32")
    assert isinstance(found, EvaluationReport)
    assert (found.tokens, found.against) == (96, against)
    with LocalModel(path, backends=["reference"], kv_type="f32") as llm:
        tokens = llm.tokenize(TEXT)[:96]
        assert found.ppl == pytest.approx(perplexity([llm.logits(tokens)], tokens), rel=1e-6)
    if against == "reference":
        assert (found.mean_kl, found.p99_kl, found.top1) == (0.0, 0.0, 1.0)
    else:
        # llama.cpp rounds activations to 8 bits; a model of the wrong weights would be far beyond 1.
        assert 0 < found.mean_kl < 0.01
        assert found.mean_kl < found.p99_kl < 0.1
        assert found.top1 > 0.9
    first = ["tokens", "ppl", "against", "mean_kl", "p99_kl", "top1"]
    assert list(found.to_json()) == [*first, "ubatch", "plan", "vs", "ratio"]
    assert (found.plan, found.vs, found.ratio) == ("reference", None, None)


@pytest.mark.parametrize("ubatch", first([4, 1]))
def test_both_are_held_against_one_yardstick(path: Path, ubatch: int) -> None:
    options: dict[str, Any] = {"backends": ["reference"], "ubatch": ubatch}
    found = evaluate.evaluate(path, TEXT, tokens=40, vs="llama.cpp", kv_type="f32", **options)
    alone = evaluate.evaluate(path, TEXT, "llama.cpp", tokens=40, kv_type="f32", **options)
    assert (found.against, found.ubatch, found.plan) == ("reference", ubatch, "reference")
    assert found.vs is not None
    # Ours is the yardstick itself here, so theirs are as far from it as from ours.
    assert found.mean_kl < 1e-9
    assert found.vs.name == "llama.cpp"
    assert 0 < found.vs.mean_kl < 0.01
    assert found.vs.mean_kl == pytest.approx(alone.mean_kl, rel=0.5)
    assert found.vs.ppl == pytest.approx(found.ppl, rel=0.05)
    assert found.ratio is not None
    assert 0 <= found.ratio < 1e-3
    lines = found.to_text().splitlines()
    assert lines[1].split() == [
        "passes",
        str(ubatch),
        *f"{'token' if ubatch == 1 else 'tokens'} each, by reference".split(),
    ]
    assert ["hetrun", "llama.cpp"] in [line.split() for line in lines]
    assert lines[-1].startswith("ratio of mean KL")


def test_what_ran_is_told_longest_first() -> None:
    stats = Stats()
    for backend, seconds in (("one", 1.0), ("two", 3.0), ("one", 1.0)):
        stats.record(TimeKey("model", backend, "1", 1)).add(1, seconds)
    stats.record(TimeKey("model", "never", "1", 1))
    assert evaluate.ran(stats) == "two + one"


def test_the_command_prints_json_or_a_table(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    settings = Settings.resolve(model=str(path), backends=["reference"], ctx=64)
    evaluate.main(settings, EvalOptions(file, json=True))
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == 64  # as many as the context holds
    assert 0 <= report["mean_kl"] < 1e-4  # F16 keys and values against float32 ones
    evaluate.main(settings, EvalOptions(file, tokens=40))
    assert capsys.readouterr().out.splitlines()[0].split() == ["tokens", "40"]


def test_what_cannot_be_evaluated_is_refused(path: Path, tmp_path: Path) -> None:
    settings = Settings.resolve(model=str(path), backends=["reference"])
    file = tmp_path / "text.txt"
    with pytest.raises(UserError, match=r"text\.txt: No such file"):
        evaluate.main(settings, EvalOptions(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="byte 0 is not UTF-8"):
        evaluate.main(settings, EvalOptions(file))
    file.write_text("a", encoding="utf-8")
    with pytest.raises(UserError, match="fewer than 2 tokens"):
        evaluate.main(settings, EvalOptions(file))
    with pytest.raises(OptionError, match="--tokens must be 2 or more, not -5"):
        evaluate.main(settings, EvalOptions(file, tokens=-5))
    with pytest.raises(OptionError, match="--vs compares both with the float32 model"):
        evaluate.main(settings, EvalOptions(file, against="llama.cpp", vs="llama.cpp"))
    with pytest.raises(OptionError, match=r"no 'vllm' to compare with"):
        evaluate.evaluate(path, TEXT, vs="vllm")
    with pytest.raises(OptionError, match="--against must be one of reference"):
        evaluate.main(settings, EvalOptions(file, against="torch"))


def test_a_folder_is_nothing_for_llama_cpp_and_one_sentence_says_what_is(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    for named in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(UserError, match=r"llama\.cpp reads GGUF files only.*hetrun convert"):
            evaluate.evaluate(named, TEXT, against="llama.cpp")


def test_a_comparison_that_fails_half_way_leaves_no_sequence_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator left open would ask a closed engine to free its sequence, with a traceback on stderr."""
    lost: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lost.append)
    monkeypatch.setattr("hetrun.tools.evaluate.oracle_logits", failing)
    with pytest.raises(UserError, match="no yardstick"):
        evaluate.evaluate(path, TEXT, tokens=8)
    gc.collect()
    assert not lost


def failing(settings: Settings, against: str, tokens: list[int], context: int) -> Iterator[Floats]:
    if tokens:
        raise UserError("no yardstick")
    yield np.zeros((0, 0), np.float32)
