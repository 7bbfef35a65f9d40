from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetrun import LLM
from tests.api.scripted import ScriptedEngine
from tests.models.cases import GQA
from tests.support.rig import model_file


@pytest.fixture(scope="session")
def tiny_llm() -> Iterator[LLM]:
    """A real model with random weights."""
    with LLM(model_file(GQA), backends=["reference"], planner="static", ctx=1024) as llm:
        yield llm


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    made = ScriptedEngine()
    yield made
    made.close()
