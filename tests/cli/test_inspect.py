"""What `hetrun inspect` says: sizes that add up, memory as it will be, metadata that is safe to print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetrun import cli
from hetrun.api.local_model import make_plan
from hetrun.config import Settings
from hetrun.executor.loading import memory_estimates
from hetrun.graph.quant import by_name
from hetrun.loader.open_model import open_model
from hetrun.memory import breakdown
from hetrun.memory.ledger import kernel_figures
from hetrun.tools import model_summary
from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.gguf_writer import MetaValue, OutputTensor, write_model
from hetrun.tools.convert.quant_mixtures import by_option
from tests.hostile.trees import Table, parse_gguf, write_gguf as write_tree
from tests.models import tiny
from tests.models.cases_hf import GEMMA3, SPARSE
from tests.models.hf import Row, folder
from tests.models.tiny import TinyLlama, write_gguf

MOE = Row("inspect", "qwen3_moe", {**SPARSE, "mlp_only_layers": [1]})
MODEL = TinyLlama("inspect", layers=3, kv_heads=2, context=10_000)

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """What the command prints."""

    def run(*arguments: object) -> str:
        code = cli.exit_code(["inspect", *map(str, arguments)])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return captured.out

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(MODEL, tmp_path / "model.gguf")


def facts_of(run: Run, *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return found


def test_sizes_add_up(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    convert_model(
        ConversionOptions(
            folder(Row("inspect-all", "qwen3_moe", {**SPARSE, "norm_topk_prob": True})),
            by_option("q4_0"),
            path,
        )
    )
    facts = facts_of(run, path, "--tensors")
    total = sum(t["bytes"] for t in facts["tensors"])
    assert sum(t["bytes"] for t in facts["types"].values()) == total == facts["memory"]["weights"]
    assert sum(t["tensors"] for t in facts["types"].values()) == len(facts["tensors"])
    assert sum(n for parts in facts["parts"].values() for n in parts.values()) == total
    assert facts["bits_per_weight"] == pytest.approx(8 * total / facts["parameters"], abs=1e-3)
    assert facts["bytes"] == path.stat().st_size


def test_without_a_vocabulary_the_model_has_a_row_for_each_token(run: Run, model: Path) -> None:
    """Whatever it says of their number, which nothing else reads."""
    tree = parse_gguf(model.read_bytes())
    said = tree.get("pairs").set("tokenizer.ggml.model", Table((("value", "none"),)))
    said = said.set("llama.vocab_size", Table((("value", 1.5),)))
    model.write_bytes(write_tree(tree.set("pairs", said)))
    facts = facts_of(run, model)
    assert (facts["vocabulary"], facts["tokenizer"]) == (tiny.VOCAB, "none")


def test_parts_by_layer(run: Run) -> None:
    parts = facts_of(run, folder(MOE))["parts"]
    assert list(parts) == ["embedding", "blk.0", "blk.1", "output"]
    assert set(parts["blk.0"]) == {"attention", "ffn", "experts"}
    assert set(parts["blk.1"]) == {"attention", "ffn"}
    assert parts["embedding"] == {"other": 4 * tiny.VOCAB * 128}


def test_places_of_tensors() -> None:
    assert model_summary.place("blk.12.attn_k_norm.weight") == ("blk.12", "attention")
    assert model_summary.place("blk.0.ffn_down_exps.weight") == ("blk.0", "experts")
    assert model_summary.place("blk.0.ssm_a") == ("blk.0", "attention")
    assert model_summary.place("output_norm.weight") == ("output", "other")
    assert model_summary.place("rope_freqs.weight") == ("embedding", "other")
    assert model_summary.place("v.blk.0.attn_q.weight") == ("elsewhere", "other")


def test_memory_by_context(run: Run, model: Path) -> None:
    kv = facts_of(run, model)["memory"]["kv"]
    assert list(kv) == ["2048", "8192", "10000"]
    # Keys and values of two heads of 32 in each of three layers.
    assert kv["2048"] == {"f16": 2048 * 3 * 2 * 64 * 2, "q8_0": 2048 * 3 * 2 * 2 * 34}


def test_memory_is_what_plan_counts(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same process, and one full sequence."""
    figures = kernel_figures()
    monkeypatch.setattr(memory_estimates, "kernel_figures", lambda: figures)
    settings = Settings.resolve(
        environ=None, model=str(model), ctx=8192, kv_type="f16", backends=["llamacpp"], planner="static"
    )
    bill = dict(make_plan(settings).memory)
    bill.pop(breakdown.KV_ALL)
    memory = facts_of(run, model)["memory"]
    assert bill[breakdown.KV_ONE] == memory["kv"]["8192"]["f16"]
    said = memory["besides"] + memory["weights"] + memory["kv"]["8192"]["f16"]
    assert breakdown.total(bill) == pytest.approx(said, abs=4096)  # whole pages
    (row,) = [line.split() for line in run(model).splitlines() if line.split()[:1] == ["8,192"]]
    assert float(row[3].replace(",", "")) == pytest.approx(said / 2**20, abs=0.1)


def test_a_window_bounds_what_its_layers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_summary, "AT_ONCE", 8)
    row = next(row for row in GEMMA3 if row.name == "pattern")
    kv = model_summary.memory(open_model(folder(row))).kv[256]
    # One layer keeps all, two keep eight tokens, eight that come in and 64 to take back, in blocks of 32.
    assert kv["f16"] == (256 + 2 * 96) * 2 * 64 * 2


def test_memory_of_an_architecture_that_hetrun_does_not_have(run: Run, tmp_path: Path) -> None:
    sizes: dict[str, MetaValue] = {"block_count": 2, "embedding_length": 64, "context_length": 4096}
    heads: dict[str, MetaValue] = {"attention.head_count": 4, "attention.head_count_kv": 2}
    metadata: dict[str, MetaValue] = {f"strange.{key}": value for key, value in (sizes | heads).items()}
    path = tmp_path / "x.gguf"
    vector = np.zeros(64, np.float32).view(np.uint8)
    write_model(
        path,
        {"general.architecture": "strange", **metadata},
        [OutputTensor("odd", (64,), by_name("F32"))],
        [(0, vector)],
    )
    facts = facts_of(run, path)
    assert "hetrun's own" not in facts["runs"]
    assert facts["parts"] == {"elsewhere": {"other": 256}}
    assert facts["tokenizer"] == "none"
    memory = facts["memory"]
    assert (
        memory["kv"].get("4096", {}).get("f16") == 4096 * 2 * 2 * 32 * 2 or "cannot be told" in memory["note"]
    )
    assert "strange" in run(path)


def test_long_arrays_are_shortened_unless_full(run: Run, model: Path) -> None:
    tokens = facts_of(run, model)["metadata"]["tokenizer.ggml.tokens"]
    assert tokens["count"] == tiny.VOCAB
    assert tokens["first"][:2] == list(tiny.SPECIAL)
    assert len(tokens["first"]) == 64
    full = facts_of(run, model, "--full")["metadata"]
    assert len(full["tokenizer.ggml.tokens"]) == tiny.VOCAB
    assert full["tokenizer.ggml.token_type"][:3] == [3, 3, 1]
    assert full["llama.block_count"] == 3


def test_text_keeps_to_80_columns_and_says_what_matters(run: Run, model: Path) -> None:
    text = run(model, "--tensors")
    lines = [line for line in text.splitlines() if not line.startswith(("path", "template"))]
    assert max(map(len, lines)) <= 80
    for said in (
        "llama, hetrun's own",
        "320 tokens",
        "blk.0-2",
        "KV f16",
        "general.name",
        "blk.2.ffn_up.weight",
        "the model's own (tokenizer.chat_template)",
    ):
        assert said in text


def test_a_folder(run: Run) -> None:
    facts = facts_of(run, folder(MOE))
    assert facts["format"] == "safetensors"
    assert facts["architecture"] == "qwen3moe"
    assert facts["metadata"]["qwen3moe.expert_count"] == 6
    assert "qwen3moe, hetrun's own" in run(folder(MOE))


def test_texts_from_a_file_cannot_command_the_terminal(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    evil: dict[str, MetaValue] = {
        "general.architecture": "x",
        "general.name": "a\x1b[2Jb\x9b31m\nparameters     none",
        "x.list": ["\x1b]0;t\x07"],
    }
    write_model(path, evil, [], [])
    text, facts = run(path), run(path, "--json")
    for control in "\x1b\x07\x9b":
        assert control not in text + facts
    assert "\nparameters     none" not in text
    assert json.loads(facts)["name"] == evil["general.name"]
