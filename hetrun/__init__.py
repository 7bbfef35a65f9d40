"""hetrun runs local language models within a memory limit you choose.

`LLM("model.gguf")` loads a model in this process; `generate`, `stream` and `chat` answer. `AsyncLLM` does the
same beside an event loop.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetrun.api.async_llm import AsyncLLM as AsyncLLM
    from hetrun.api.llm import LLM as LLM
    from hetrun.api.ranking import Ranked as Ranked
    from hetrun.client.completion import (
        ChatChunk as ChatChunk,
        Completion as Completion,
        ToolCall as ToolCall,
    )
    from hetrun.client.events import Event as Event, ModelInfo as ModelInfo
    from hetrun.client.sampling_params import SamplingParams as SamplingParams
    from hetrun.errors import HetrunError as HetrunError, UserError as UserError

__version__ = "0.1.0"

# Public name -> its module, imported when the name is first asked for: `import hetrun` stays cheap.
_EXPORTS = {
    "AsyncLLM": "hetrun.api.async_llm",
    "LLM": "hetrun.api.llm",
    "ChatChunk": "hetrun.client.completion",
    "Completion": "hetrun.client.completion",
    "Event": "hetrun.client.events",
    "HetrunError": "hetrun.errors",
    "ModelInfo": "hetrun.client.events",
    "Ranked": "hetrun.api.ranking",
    "SamplingParams": "hetrun.client.sampling_params",
    "ToolCall": "hetrun.client.completion",
    "UserError": "hetrun.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "ChatChunk",
    "Completion",
    "Event",
    "HetrunError",
    "ModelInfo",
    "Ranked",
    "SamplingParams",
    "ToolCall",
    "UserError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hetrun' has no attribute {name!r}")
    value: object = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
