"""llama models, the reference backend against transformers in float32."""

from __future__ import annotations

import numpy as np
import pytest

from hetrun import LLM
from tests.models import cases, oracle, tiny
from tests.models.tiny import TinyLlama
from tests.support.rig import model_file

TOKENS = tiny.random_tokens(40)


@pytest.mark.parametrize("case", [*cases.LLAMA, *cases.EACH_TYPE], ids=str)
def test_reference_backend_agrees_with_transformers(case: TinyLlama) -> None:
    with LLM(model_file(case), backends=["reference"], kv_type="f32") as llm:
        found = llm.logits(TOKENS)
    expected = oracle.logits(case, TOKENS)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-3
    assert (found.argmax(-1) == expected.argmax(-1)).all()
