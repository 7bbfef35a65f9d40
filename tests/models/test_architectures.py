"""Every architecture and variant, from a folder that Hugging Face's own code saved, against that code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetrun.api.local_model import LocalModel
from hetrun.tools.evaluate import compare
from tests.models import cases_hf, hf, tiny
from tests.models.cases_hf import MANY, only
from tests.models.hf import Row
from tests.models.tiny import F32

TOKENS = tiny.random_tokens(60)  # longer than every sliding window


@pytest.mark.parametrize("row", cases_hf.representative(cases_hf.ROWS))
def test_reference_backend_agrees_with_transformers(row: Row) -> None:
    ours, expected = hetrun_logits(row, "reference", "f32"), hf.logits(hf.folder(row), TOKENS)
    assert ours.dtype == np.float32
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() < 1e-3
    assert (ours.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("row", only(MANY, cases_hf.representative(cases_hf.ROWS)))
def test_llamacpp_backend_is_close_to_transformers(row: Row) -> None:
    # By f32 or f16 keys, or by bfloat16 activations, as ggml multiplies them with bfloat16 weights: such last
    # bits flip a router's choice between two experts that it likes alike, so mixtures get f32 keys.
    mixture = any("expert" in key for key in row.config)
    ours = hetrun_logits(row, "llamacpp", "f32" if mixture else "f16")
    closeness = compare([hf.logits(hf.folder(row), TOKENS)], [ours])
    assert closeness.mean_kl < (2e-3 if row.dtype is torch.bfloat16 else 1e-4)


# What this tries are the rows, and nothing of hetrun: they change seldom.
@pytest.mark.parametrize("row", only(cases_hf.QUICK, cases_hf.representative(cases_hf.SPECIAL)))
def test_what_is_special_about_a_row_matters(row: Row) -> None:
    """Or else the tests above would prove nothing: without the setting the same weights say other things."""
    config = {k: v for k, v in row.config.items() if k not in cases_hf.SETTINGS}
    without = Row(f"{row.name}-without", row.model_type, config, dtype=row.dtype)
    change = hf.logits(hf.folder(row), TOKENS) - hf.logits(hf.folder(without), TOKENS)
    assert np.abs(change).max() > 0.1


def hetrun_logits(row: Row, backend: str, kv_type: str) -> F32:
    with LocalModel(hf.folder(row), backends=[backend], kv_type=kv_type, ctx=row.ctx) as llm:
        return llm.logits(TOKENS)
