"""Every tensor of a model, also of types that hetrun cannot read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from hetrun.graph import Extent
from hetrun.graph.quant import QuantType
from hetrun.loader.gguf_source import GGUFModel
from hetrun.loader.source import ModelSource


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: `shape` rows first, and where it lies."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    path: str
    offset: int

    @property
    def weights(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


def entries(source: ModelSource) -> Iterator[TensorEntry]:
    """Every tensor, also of types that hetrun cannot read."""
    if isinstance(source, GGUFModel):
        for t in source.file.tensors.values():
            kind = t.quant.name if isinstance(t.quant, QuantType) else t.quant
            yield TensorEntry(t.name, kind, t.shape, t.nbytes, t.path, t.offset)
        return
    for w in source.weights():
        where = next(((p.path, p.offset) for p in w.parts if isinstance(p, Extent)), ("", 0))
        yield TensorEntry(w.name, w.quant.name, w.shape if w.shape[0] > 1 else w.shape[1:], w.nbytes, *where)


def parameters(source: ModelSource) -> int:
    """Numbers in all tensors."""
    return sum(e.weights for e in entries(source))
