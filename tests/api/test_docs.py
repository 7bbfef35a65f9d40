"""The examples of the pages run as they stand, with a tiny model in place of the one they name."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

import hetrun
from hetrun import LLM, AsyncLLM
from tests.models.cases import GQA
from tests.support.paths import ROOT
from tests.support.rig import model_file

SMALL: dict[str, Any] = {"backends": ["reference"], "planner": "static", "ctx": 1024, "max_tokens": 8}


class SmallLLM(LLM):
    """The tiny model, whatever is named; answers without a limit are short."""

    def __init__(self, model: str | None = None, ram: str | None = None) -> None:
        super().__init__(model if model == "missing.gguf" else model_file(GQA), ram=ram, **SMALL)


class SmallAsyncLLM(AsyncLLM):
    """The same for an event loop."""

    def __init__(self, model: str | None = None) -> None:
        super().__init__(model_file(GQA), **SMALL)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples get a tiny model, and change no logger for good."""
    monkeypatch.setattr(hetrun, "LLM", SmallLLM)
    monkeypatch.setattr(hetrun, "AsyncLLM", SmallAsyncLLM)
    loggers = [logging.getLogger(name) for name in ("hetrun", "hetrun.executor.autotune")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def examples(page: str) -> list[str]:
    """The Python blocks of a page that need no server."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [block for block in found if "import OpenAI" not in block]


@pytest.mark.parametrize("page", ["docs/python.md", "docs/guide.md", "README.md"])
def test_each_example_runs_when_pasted_on_its_own(page: str, tiny: None) -> None:
    found = examples(page)
    assert found
    for i, block in enumerate(found):
        exec(compile(block, f"{page}, example {i + 1}", "exec"), {"__name__": "__main__"})
