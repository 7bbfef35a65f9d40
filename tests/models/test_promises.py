"""What was promised of llama holds of every architecture: cancel, types of keys, long texts, context ends."""

from __future__ import annotations

import json
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetrun import SamplingParams, cli
from hetrun.api.local_model import LocalModel
from hetrun.backend import Segment, registry
from hetrun.client.completion import prompt_request
from hetrun.errors import Cancelled, ContextFull, OptionError
from hetrun.executor.loading.memory_estimates import MAX_SEQUENCES
from hetrun.memory.kv.paged_allocator import SLACK
from hetrun.tools.evaluate import compare
from tests.models import cases, cases_hf, hf, tiny
from tests.models.cases_hf import FEW, NAMES, crossed, only
from tests.models.hf import Row
from tests.models.test_sequences import assert_same
from tests.support.closeness import limit
from tests.support.part_backends import backends
from tests.support.rig import Case, Rig, ThreadedDevice, graph_of, model_file, rig

TEXT = tiny.random_tokens(250, seed=9)
ROWS = {str(row): row for row in cases_hf.ROWS}


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)


# --- cancel


def cancelling_rig(row: Row, main: str, exactly: bool) -> tuple[Rig, list[int]]:
    """One feed-forward runs elsewhere. The reference counts a number down with each segment; at 0 it cancels
    the main backend, whose next segment hears it, be it its own."""
    left = [0]

    def before(segment: Segment) -> None:
        left[0] -= 1
        if left[0] == 0:
            made.backends[main].cancel()

    devices = {name: registry.backends()[name].create() for name in backends()}
    devices["reference"] = ThreadedDevice(devices["reference"], before)
    other = next((name for name in backends() if name != main), main)
    placed = {"": main, "blk.1.ffn" if other == "reference" else "blk.0.ffn": other}
    made = rig(row, devices, placed, ubatch=16, deterministic=exactly)
    return made, left


@pytest.mark.parametrize(
    ("row", "how", "main"), crossed(NAMES, cases_hf.EACH, ("exactly", "closely"), backends())
)
def test_a_cancel_in_the_middle_of_a_step_changes_nothing(row: Row, how: str, main: str) -> None:
    """Far behind the window, with keys of the step already written; then both sequences go on."""
    exactly = how == "exactly"
    texts = {n: TEXT[:n] for n in (140, 150)}
    r, left = cancelling_rig(row, main, exactly)
    expected = []
    for text in texts.values():
        seq = r.kv.alloc()
        r.step((seq, text, []))
        expected.append(r.step((seq, TEXT[200:212], [11])))
        r.kv.free(seq)
    seqs = [r.kv.alloc() for _ in texts]
    r.step(*[(seq, text, []) for seq, text in zip(seqs, texts.values(), strict=True)])
    left[0] = 4 if main == "reference" else 2  # the second pass, or the third of its segments
    with pytest.raises(Cancelled):
        r.step(*[(seq, TEXT[100:116], [15]) for seq in seqs])
    assert [r.kv.length(seq) for seq in seqs] == list(texts)
    for device in r.backends.values():
        device.rearm()
    assert_same(np.concatenate(expected), r.step(*[(seq, TEXT[200:212], [11]) for seq in seqs]), exactly)
    r.close()


@pytest.mark.parametrize("row", [cases_hf.parameter(ROWS[n]) for n in ("mixtral-window", "phi3-longrope")])
def test_a_long_prefill_that_was_cancelled_begins_anew(row: Row) -> None:
    """A step of more than the window takes at once; the engine makes none, `logits` does."""
    r, left = cancelling_rig(row, backends()[0], exactly=False)
    expected = r.logits(r.kv.alloc(), TEXT)
    seq = r.kv.alloc()
    r.step((seq, TEXT[:30], []))
    left[0] = 9
    with pytest.raises(Cancelled):
        r.step((seq, TEXT[30:], []))
    for device in r.backends.values():
        device.rearm()
    kept = r.kv.length(seq)
    assert kept == (0 if any(g.window for g in r.kv.groups) else 30)
    assert_same(expected[kept:], r.logits(seq, TEXT[kept:]), exactly=False)
    r.close()


@pytest.mark.parametrize(("row", "name"), crossed(NAMES, cases_hf.WINDOWED, backends()))
def test_as_much_as_the_slack_is_taken_back(row: Row, name: str) -> None:
    r = rig(row, {name: registry.backends()[name].create()}, ubatch=16, deterministic=True)
    expected = r.logits(r.kv.alloc(), TEXT[:210])
    seq = r.kv.alloc()
    r.step((seq, TEXT[:200], []))
    for n in (200 - SLACK, 150):
        r.kv.truncate(seq, n)
        forked = r.kv.fork(seq)
        for one in (seq, forked):
            found = r.logits(one, TEXT[n:210])
            assert np.array_equal(found, expected[n:])
        r.kv.free(forked)
    r.close()


# --- types of keys and values


@pytest.mark.slow
@pytest.mark.parametrize(("row", "kv_type"), crossed(NAMES, cases_hf.EACH, ("q8_0", "f16", "f32")))
def test_types_of_keys_and_values(row: Row, kv_type: str) -> None:
    expected = hf.logits(hf.folder(row), TEXT[:120])
    for name in backends():
        with LocalModel(hf.folder(row), backends=[name], kv_type=kv_type, ubatch=16) as llm:
            closeness = compare([expected], [llm.logits(TEXT[:120])])
        assert closeness.mean_kl < {"f32": 1e-4, "f16": 1e-4, "q8_0": 0.02}[kv_type]


def test_heads_that_are_no_whole_blocks() -> None:
    row = Row("heads-of-48", "llama", {"head_dim": 48})
    with pytest.raises(OptionError, match="--kv-type q8_0 needs heads of a multiple of 32, not 48"):
        LocalModel(hf.folder(row), kv_type="q8_0")


# --- long texts and long answers


@pytest.mark.slow
@pytest.mark.parametrize("row", only(NAMES, cases_hf.WINDOWED))
def test_texts_far_beyond_a_pass_and_a_window(row: Row) -> None:
    expected = hf.logits(hf.folder(row), TEXT)
    for name in backends():
        with LocalModel(hf.folder(row), backends=[name], kv_type="f32", ubatch=16) as llm:
            found = llm.logits(TEXT)
        if name == "reference":
            assert np.abs(found - expected).max() < 1e-3
            assert (found.argmax(-1) == expected.argmax(-1)).all()
        assert compare([expected], [found]).mean_kl < (2e-3 if row.dtype is torch.bfloat16 else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("row", only(FEW, cases_hf.EACH))
def test_greedy_answers_are_those_of_transformers(row: Row) -> None:
    """More than three windows long, and with a window of 8 in small passes, so that it moves."""
    prompts = [TEXT[:60], TEXT[100:135]]  # longer than where LongRoPE changes its factors
    expected = [generated(row, prompt, 80) for prompt in prompts]
    with LocalModel(hf.folder(row), backends=["reference"], kv_type="f32", ubatch=4) as llm:
        assert [c.tokens for c in llm.generate(prompts, greedy(80))] == expected


def generated(row: Row, prompt: Sequence[int], n: int) -> list[int]:
    """By transformers, with its own cache."""
    model: Any = hf._loaded(hf.folder(row))
    ids = torch.tensor([list(prompt)])
    settings = {"do_sample": False, "max_new_tokens": n, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.mark.parametrize(
    ("case", "deterministic"), [(ROWS["mistral-window"], False), (cases.GQA, True)], ids=["window", "exactly"]
)
def test_logits_while_as_many_answers_as_can_be_are_on_their_way(case: Case, deterministic: bool) -> None:
    events: queue.SimpleQueue[int] = queue.SimpleQueue()
    with LocalModel(model_file(case), backends=["reference"], deterministic=deterministic) as llm:
        expected = llm.logits(TEXT[:20])
        request = prompt_request(TEXT[:3], greedy(200))
        ids = [llm.submit(request, lambda event, i=i: events.put(i)) for i in range(MAX_SEQUENCES)]  # type: ignore[misc]
        running: set[int] = set()
        while len(running) < MAX_SEQUENCES:
            running.add(events.get())
        assert np.array_equal(llm.logits(TEXT[:20]), expected)
        for answer in ids:
            llm.cancel(answer)


# --- the end of the context


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "ctx"),
    [
        *crossed(FEW, [row for row in cases_hf.EACH if row.id != "phi3-longrope"], (31, 33, 100, 32)),
        *(pytest.param(ROWS["phi3-longrope"], ctx, id=f"phi3-longrope-{ctx}") for ctx in (31, 32, 33, 100)),
    ],
)
def test_an_answer_ends_where_the_context_does(row: Row, ctx: int) -> None:
    """The factors of LongRoPE change beyond 32 tokens, windows are of 8."""
    for name in backends():
        with LocalModel(hf.folder(row), backends=[name], kv_type="f32", ctx=ctx, ubatch=8) as llm:
            answers = llm.generate(
                [TEXT[:20], TEXT[: ctx - 1]], SamplingParams(temperature=0, ignore_eos=True)
            )
            assert [c.finish_reason for c in answers] == ["length", "length"]
            assert [len(c.tokens) for c in answers] == [ctx - 20, 1]
            # Teacher-forced; transformers takes long factors for this text just where the context is long.
            text = [*TEXT[:20], *answers[0].tokens]
            assert len(text) == ctx
            expected, found = hf.logits(hf.folder(row), text), llm.logits(text)
            assert np.abs(found - expected).max() < limit(row)
            assert expected[19:-1].argmax(-1).tolist() == answers[0].tokens
            assert llm.generate([TEXT[: ctx - 3]], greedy(50))[0].finish_reason == "length"
            with pytest.raises(ContextFull, match=f"{ctx} tokens, but the context holds {ctx}"):
                llm.generate([TEXT[:ctx]], greedy(1))
            with pytest.raises(OptionError, match=f"{ctx + 1} tokens do not fit into the context of {ctx}"):
                llm.logits(TEXT[: ctx + 1])


# --- plans


@pytest.mark.slow
@pytest.mark.parametrize("row", only(cases_hf.QUICK, cases_hf.EACH))
def test_a_plan_that_was_printed_and_edited(
    row: Row, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`hetrun plan --json`, each part of a layer moved by hand, and back through `--plan`."""
    capsys.readouterr()
    assert cli.exit_code(["plan", "-m", str(hf.folder(row)), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    scopes = {op.scope.split(".")[-1]: op.scope for op in graph_of(row).ops}
    for plan in data["plans"]:
        for i, scope in enumerate(scopes.values()):
            placement = {"scope": scope, "backend": backends()[i % len(backends())], "why": "by hand"}
            plan["placements"].append(placement)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    expected = hf.logits(hf.folder(row), TEXT[:50])
    with LocalModel(hf.folder(row), kv_type="f32", plan=file) as llm:
        plans, segments = llm.plan.to_json()["plans"], llm.plan.plans["1"].segments
        assert {s.backend for s in segments} == set(backends())
        assert "by hand" in {s.why for s in segments}
        assert np.abs(llm.logits(TEXT[:50]) - expected).max() < limit(row)
    assert cli.exit_code(["plan", "-m", str(hf.folder(row)), "--plan", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"] == plans
