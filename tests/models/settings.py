"""A model that is nothing but settings: its weights have whatever shape a graph asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hetrun.graph import Constant, GraphBuilder, Weight
from hetrun.graph.quant import by_name
from hetrun.loader.hf_mapping import Config


class Settings(Config):
    """Settings by GGUF key; None is none."""

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__("the settings", {"vocab_size": 10, **values})

    def builder(self, context: int | None = None, tensors: Collection[str] = ()) -> GraphBuilder:
        """A builder that finds all weights; `has` says so of the named ones only."""
        return _Builder(self, context, tensors)


class _Builder(GraphBuilder):
    def __init__(self, settings: Settings, context: int | None, tensors: Collection[str]) -> None:
        super().__init__(_Nothing(), context)
        self._there = tensors

    def has(self, name: str) -> bool:
        return name in self._there

    def weight(self, name: str, rows: int, width: int) -> Weight:
        data = Constant(bytes(4 * rows * width), rows)
        return Weight(name, (rows, width), by_name("F32"), (data,))


class _Nothing:
    path = "the settings"

    def find(self, name: str) -> Weight | None:
        return None
