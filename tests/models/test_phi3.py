"""What is Phi-3's own: matrices of several products, and rope's factors for short and for long contexts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetrun import LLM
from hetrun.graph.ops import Attention, Rope
from hetrun.loader.architectures import build_graph
from hetrun.loader.hf_source import open_folder
from hetrun.models import phi3
from hetrun.tools.evaluate import evaluate, least_context
from tests.models import cases_hf, hf, tiny
from tests.models.settings import Settings

ROWS = {row.name: row for row in cases_hf.PHI3}
SWITCH = replace(ROWS["longrope"], name="longrope-switch", config=cases_hf.longrope(original=64))


@pytest.mark.parametrize(("context", "factors"), [(32, "short"), (64, "short"), (65, "long"), (None, "long")])
def test_factors_are_chosen_by_the_context_that_was_asked_for(context: int | None, factors: str) -> None:
    ops = build_graph(open_folder(hf.folder(SWITCH)), context).ops
    names = {w.name for op in ops if op.kind == "rope" for w in op.weights}
    assert names == {f"rope_factors_{factors}.weight"}


@pytest.mark.parametrize(("ctx", "n"), [(64, 60), (128, 100), (None, 100)])
@pytest.mark.parametrize("backend", ["reference", "llamacpp"])
def test_transformers_chooses_the_same_when_the_sequence_is_as_long(
    ctx: int | None, n: int, backend: str
) -> None:
    tokens = tiny.random_tokens(n)
    with LLM(hf.folder(SWITCH), backends=[backend], kv_type="f32", ctx=ctx) as llm:
        found = llm.logits(tokens)
    assert np.abs(found - hf.logits(hf.folder(SWITCH), tokens)).max() < 1e-3


def test_what_a_model_is_compared_with_has_the_same_factors() -> None:
    """A text may be shorter than where they change, while the model is open for longer ones."""
    path, text = hf.folder(SWITCH), "the rain on the hill " * 20
    assert [least_context(path, 40, context) for context in (40, 64, 65, 256)] == [40, 40, 65, 65]
    assert least_context(path, 100, 256) == 100
    for ctx in (64, None):
        found = evaluate(path, text, tokens=50, backends=["reference"], kv_type="f32", ctx=ctx)
        assert (found.tokens, found.mean_kl) == (50, 0.0)


def test_attention_factor() -> None:
    key = "rope.scaling.attn_factor"
    said = {name: open_folder(hf.folder(row)).imported.settings for name, row in ROWS.items()}
    expected = np.sqrt(1 + np.log(256 / 32) / np.log(32))
    assert said["longrope"][key] == pytest.approx(expected)
    expected = np.sqrt(1 + np.log(32) / np.log(32))
    assert said["longrope-factor"][key] == pytest.approx(expected)
    assert said["longrope-attention-factor"][key] == 1.5
    assert key not in said["gqa"]


def test_one_weight_for_q_k_and_v_and_one_for_gate_and_up() -> None:
    settings = Settings(
        {
            "embedding_length": 64,
            "block_count": 2,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "feed_forward_length": 96,
            "context_length": 256,
            "attention.sliding_window": 8,
        }
    )
    graph = phi3.build(settings.builder(tensors={f"blk.{i}.attn_qkv.weight" for i in (0, 1)}), settings)
    names = {op.scope: op.weights[0].name for op in graph.ops if op.kind == "linear"}
    assert names["blk.1.attn.q"] == "blk.1.attn_qkv.weight[0:64]"
    assert names["blk.1.attn.k"] == "blk.1.attn_qkv.weight[64:96]"
    assert names["blk.1.attn.v"] == "blk.1.attn_qkv.weight[96:128]"
    assert names["blk.1.ffn.gate"] == "blk.1.ffn_up.weight[0:96]"
    assert names["blk.1.ffn.up"] == "blk.1.ffn_up.weight[96:192]"
    assert {op.attrs.window for op in graph.ops if isinstance(op.attrs, Attention)} == {8}
    assert not any(op.attrs.interleaved for op in graph.ops if isinstance(op.attrs, Rope))
