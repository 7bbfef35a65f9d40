"""The tiny models themselves: llama.cpp reads the files as transformers reads the configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.models import cases, oracle, tiny
from tests.models.tiny import F32, TinyLlama
from tests.support.peer import llama_cpp
from tests.support.tiers import first

# Nothing of hetrun is tried here: what the other tests compare with changes only with the libraries.
pytestmark = pytest.mark.slow

TOKENS = tiny.random_tokens(40)
F32_TYPE = 0  # of the KV cache: GGML_TYPE_F32


def llama_cpp_logits(case: TinyLlama, path: Path) -> F32:
    scaling = case.rope or tiny.RopeScaling("linear", 1.0)
    model = llama_cpp().Llama(
        str(tiny.write_gguf(case, path)),
        n_ctx=64,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        type_k=F32_TYPE,
        type_v=F32_TYPE,
        # For this architecture llama.cpp does not read the file's.
        yarn_beta_fast=scaling.beta_fast,
        yarn_beta_slow=scaling.beta_slow,
        verbose=False,
    )
    try:
        model.eval(TOKENS)
        return np.array(model.scores[: len(TOKENS)], dtype=np.float32)
    finally:
        model.close()


@pytest.mark.parametrize("case", first(cases.LLAMA), ids=str)
def test_llama_cpp_and_transformers_agree(case: TinyLlama, tmp_path: Path) -> None:
    found = llama_cpp_logits(case, tmp_path / "tiny.gguf")
    expected = oracle.logits(case, TOKENS)
    assert np.abs(found - expected).max() < 2e-4
    assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("case", first(cases.QUANTISED), ids=str)
def test_quantised_files_hold_what_the_oracle_has(case: TinyLlama, tmp_path: Path) -> None:
    # ggml rounds activations too, so this is close, not equal.
    found = llama_cpp_logits(case, tmp_path / "tiny.gguf")
    expected = oracle.logits(case, TOKENS)
    nmse = np.square(found - expected).mean() / np.square(expected).mean()
    assert nmse < 5e-3


@pytest.mark.parametrize("case", first([case for case in cases.LLAMA if case.rope is not None]), ids=str)
def test_rope_scaling_shows_in_the_logits(case: TinyLlama) -> None:
    """A backend that ignored the scaling could not pass: the prompt is long enough to see it."""
    difference = np.abs(oracle.logits(case, TOKENS) - oracle.logits(replace(case, rope=None), TOKENS))
    assert difference.max() > 0.1
