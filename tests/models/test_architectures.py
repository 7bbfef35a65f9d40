"""Every architecture and variant, from a folder that Hugging Face's own code saved, against that code."""

from __future__ import annotations

import numpy as np
import pytest

from hetrun import LLM
from hetrun.evaluate import compare
from tests.models import cases_hf, hf, tiny
from tests.models.hf import Row
from tests.models.tiny import F32

TOKENS = tiny.random_tokens(60)  # longer than every sliding window


@pytest.mark.parametrize("row", cases_hf.ROWS, ids=str)
def test_reference_backend_agrees_with_transformers(row: Row) -> None:
    ours, expected = hetrun_logits(row, "reference"), hf.logits(hf.folder(row), TOKENS)
    assert ours.dtype == np.float32
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() < 1e-3
    assert (ours.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("row", cases_hf.ROWS, ids=str)
def test_llamacpp_backend_is_close_to_transformers(row: Row) -> None:
    ours, expected = hetrun_logits(row, "llamacpp"), hf.logits(hf.folder(row), TOKENS)
    assert compare([expected], [ours]).mean_kl < 1e-4


def hetrun_logits(row: Row, backend: str) -> F32:
    with LLM(hf.folder(row), backends=[backend], kv_type="f32") as llm:
        return llm.logits(TOKENS)
