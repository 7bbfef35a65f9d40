"""Prompts in one long pass, in short ones, and in pieces as `--deterministic` reads them: the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetrun import LLM
from tests.models.tiny import TinyLlama, write_gguf

TEXT = [int(t) for t in np.random.default_rng(0).integers(3, 250, 1500)]


def bits(path: Path, options: Mapping[str, Any]) -> np.ndarray:
    with LLM(path, backends=["llamacpp"], planner="static", ctx=2048, **options) as llm:
        return llm.logits(TEXT).view(np.int32)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "f32"])
def test_a_row_does_not_tell_how_many_came_with_it(kv_type: str, tmp_path: Path) -> None:
    path = write_gguf(TinyLlama("long", kv_heads=2, quant="Q8_0", context=2048), tmp_path / "t.gguf")
    short = bits(path, {"kv_type": kv_type, "ubatch": 32, "deterministic": True})
    for options in ({"ubatch": 1500}, {"ubatch": 100}, {"deterministic": True}):
        assert np.array_equal(bits(path, {"kv_type": kv_type, **options}), short), options
