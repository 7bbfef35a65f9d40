"""Models that several files here run, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools import make_model

# 170 MB of weights: one copy too many is more than what other needs of a process differ by.
SHAPE = make_model.Shape(
    "tall", embd=1024, layers=20, ffn=4096, heads=16, kv_heads=4, head_dim=64, vocab=4096
)


@pytest.fixture(scope="session")
def tall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of many layers, of 4 bits."""
    path = tmp_path_factory.mktemp("tall") / "tall-q4_0.gguf"
    make_model.write_model(path, SHAPE, "Q4_0", 0)
    return path
