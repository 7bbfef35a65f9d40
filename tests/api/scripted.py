"""An `LLM` whose answers a test writes: it says what follows "say" in the last message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from hetrun.api.async_llm import AsyncLLM
from hetrun.api.llm import LLM
from hetrun.api.local_model import LocalModel
from hetrun.config import Settings
from hetrun.engine.engine import Engine
from hetrun.pictures.decoder import PictureDecoder
from hetrun.text.chat import ChatTemplate
from hetrun.text.chat.renderer import TemplateWorker
from tests.support.fakes import FakeEngine


class ScriptedEngine(FakeEngine):
    """The fake engine in the place of the real one."""

    is_closed = False

    def check_here(self) -> None:
        """It is where it was made."""

    def close(self) -> None:
        self.is_closed = True
        super().close()


def scripted_model(engine: ScriptedEngine, **settings: object) -> LocalModel:
    """A model without weights."""
    model = LocalModel.__new__(LocalModel)
    model.settings = Settings.resolve(environ={"HETRUN_CONFIG": "/dev/null"}, **settings)
    model.info = replace(engine.info, thought_mark="<think>")
    model._templates = TemplateWorker(ChatTemplate.named("chatml"))
    model._decoder = PictureDecoder()
    model._engine = cast("Engine", engine)
    return model


def scripted_llm(engine: ScriptedEngine, **settings: object) -> LLM:
    """A model without weights, for programs."""
    llm = LLM.__new__(LLM)
    llm._model = scripted_model(engine, **settings)
    return llm


def scripted_async(engine: ScriptedEngine, **settings: Any) -> AsyncLLM:  # noqa: ANN401
    """The same for an event loop."""
    llm = AsyncLLM(**settings)
    llm._load = lambda: scripted_model(engine, **settings)
    return llm
