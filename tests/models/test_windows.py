"""Layers with a window, far behind it: in small passes, side by side, forked, cut and after a failure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hetrun import LLM, SamplingParams
from hetrun.backend import registry
from hetrun.tools.evaluate import compare
from tests.models import cases, cases_hf, hf, tiny
from tests.models.hf import Row
from tests.support.part_backends import backends
from tests.support.rig import Rig, rig

WINDOWS = (20, 0)
TEXT = tiny.random_tokens(400)


def open_rig(backend: str, ubatch: int, windows: Sequence[int] = WINDOWS, exactly: bool = False) -> Rig:
    device = registry.backends()[backend].create()
    return rig(
        cases.GQA, {backend: device}, ubatch=ubatch, context=512, deterministic=exactly, windows=windows
    )


def whole(windows: Sequence[int] = WINDOWS) -> np.ndarray:
    """In one pass, by masks alone."""
    r = open_rig("reference", 512, windows)
    return r.logits(r.kv.alloc(), TEXT)


def assert_close(expected: np.ndarray, found: np.ndarray) -> None:
    assert np.abs(expected - found).max() < 2e-3
    assert (expected.argmax(-1) == found.argmax(-1)).all()


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("windows", [(20, 0), (20, 50), (1, 20)], ids=str)
def test_small_passes_and_single_tokens_say_what_one_pass_says(
    backend: str, windows: tuple[int, int]
) -> None:
    expected = whole(windows)
    assert np.abs(expected - whole((0, 0))).max() > 0.1
    r = open_rig(backend, 7, windows)
    seq = r.kv.alloc()
    found = [r.logits(seq, TEXT[:250])]  # one step, many passes
    found += [r.logits(seq, [token]) for token in TEXT[250:]]
    assert_close(expected, np.concatenate(found))
    assert r.kv.groups[-1].rows == 8 * (96 if windows[1] < 50 else 128)
    r.close()


@pytest.mark.parametrize("backend", backends())
def test_sequences_side_by_side_forked_and_cut(backend: str) -> None:
    expected = whole()
    r = open_rig(backend, 64)
    a, b, c = r.kv.alloc(), r.kv.alloc(), r.kv.alloc()
    r.step((a, TEXT[:310], []), (b, TEXT[:5], []), (c, TEXT[:90], []))
    r.step((a, TEXT[200:240], []))  # what is taken back
    r.kv.truncate(a, 310)
    forked = r.kv.fork(a)
    r.step((a, TEXT[:60], []))  # the parent goes another way
    found = []
    for i in range(30):
        texts = [(forked, 310 + i), (b, 5 + i), (c, 90 + i)]
        logits = r.step(*[(seq, [TEXT[at]], [0]) for seq, at in texts])
        found.append(logits - expected[[at for _, at in texts]])
    assert np.abs(found).max() < 2e-3
    r.close()


@pytest.mark.parametrize("backend", backends())
def test_deterministic_is_one_numeric_path(backend: str) -> None:
    found = []
    for ubatch in (3, 100):
        r = open_rig(backend, ubatch, exactly=True)
        seq = r.kv.alloc()
        found.append(np.concatenate([r.logits(seq, TEXT[a : a + 50]) for a in range(0, 200, 50)]))
        r.close()
    assert np.array_equal(found[0], found[1])


SLIDING = [row for row in cases_hf.ROWS if str(row) in ("mistral-window", "gemma3_text-pattern")]


@pytest.mark.parametrize("row", SLIDING, ids=str)
def test_far_behind_the_window_models_say_what_transformers_says(row: Row) -> None:
    text = TEXT[:250]
    expected = hf.logits(hf.folder(row), text)
    with LLM(hf.folder(row), backends=["reference"], kv_type="f32", ubatch=4) as llm:
        assert np.abs(llm.logits(text) - expected).max() < 1e-3
    with LLM(hf.folder(row), backends=["llamacpp"], kv_type="f32", ubatch=4) as llm:
        assert compare([expected], [llm.logits(text)]).mean_kl < 1e-4


@pytest.mark.parametrize("row", SLIDING, ids=str)
def test_an_answer_far_behind_the_window_is_what_one_pass_would_have_said(row: Row) -> None:
    greedy = SamplingParams(max_tokens=180, temperature=0, ignore_eos=True)
    prompt = TEXT[:40]
    with LLM(hf.folder(row), backends=["reference"], kv_type="f32", ubatch=4) as llm:
        answer = llm.generate([prompt], greedy)[0].tokens
    with LLM(hf.folder(row), backends=["reference"], kv_type="f32") as llm:
        logits = llm.logits([*prompt, *answer[:-1]])
    assert len(SLIDING) == 2
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == answer
