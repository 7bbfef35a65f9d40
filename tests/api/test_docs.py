"""The examples of the pages run as they stand, with a tiny model in the place of model.gguf."""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

import hetrun
from hetrun import LLM, AsyncLLM, SamplingParams
from hetrun.client.completion import ToolCall
from tests.models.cases import GQA
from tests.support.paths import ROOT
from tests.support.rig import model_file

SMALL: dict[str, Any] = {"backends": ["reference"], "planner": "static", "ctx": 1024, "max_tokens": 8}


class SmallLLM(LLM):
    """The tiny model, whatever is named; answers are short."""

    def __init__(self, model: str, ram: str | None = None) -> None:
        super().__init__(model_file(GQA), ram=ram, **SMALL)


class SmallAsyncLLM(AsyncLLM):
    """The same for an event loop."""

    def __init__(self, model: str) -> None:
        super().__init__(model_file(GQA), **SMALL)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the examples take for granted."""
    monkeypatch.setattr(hetrun, "LLM", SmallLLM)
    monkeypatch.setattr(hetrun, "AsyncLLM", SmallAsyncLLM)
    # A tiny model calls nothing by itself.
    monkeypatch.setattr(ToolCall, "parsed", lambda call: {"city": "Oslo"})
    loggers = [logging.getLogger(name) for name in ("hetrun", "hetrun.executor.autotune")]
    levels = [logger.level for logger in loggers]
    with SmallLLM("model.gguf") as llm:
        yield {
            "llm": llm,
            "asyncio": asyncio,
            "logging": logging,
            "SamplingParams": SamplingParams,
            "AsyncLLM": SmallAsyncLLM,
            "look_up": lambda city: f"snow in {city}",
            "questions": ["Who?", "When?"],
        }
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize("page", ["docs/python.md", "docs/guide.md", "README.md"])
async def test_examples_run(page: str, names: dict[str, Any]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    found = [block for block in found if "import OpenAI" not in block]  # which needs a server
    assert found
    llm = names["llm"]
    for i, block in enumerate(found):
        code = compile(block, f"{page}, example {i + 1}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        done = eval(code, names)
        if inspect.isawaitable(done):
            await done
        names["llm"] = llm  # examples after it use one that is open
