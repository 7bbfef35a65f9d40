"""Models that are made where they are needed: random weights of real types, all layers alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tools.make_model import SHAPES, Making, write_model

TOKENIZER = "TESTS_TOKENIZER"  # a model whose tokenizer is copied, where SmolLM2 is not installed


@dataclass(frozen=True, slots=True)
class Wanted:
    """A shape, and the type of most of its weights."""

    shape: str
    quant: str
    real_routing: bool = False  # tokens choose experts as a trained model's do

    def __str__(self) -> str:
        return f"{self.shape}-{self.quant}"


def made(folder: Path, wanted: Wanted) -> Path:
    """Its file, made if it is not there."""
    path = folder / f"{wanted}.gguf"
    if not path.exists():
        tokenizer = os.environ.get(TOKENIZER)
        alike = not wanted.real_routing
        making = Making(Path(tokenizer) if tokenizer else None, alike, wanted.real_routing)
        write_model(path, SHAPES[wanted.shape], wanted.quant, 0, making)
    return path


def chosen(wanted: Sequence[Wanted], only: str) -> tuple[Wanted, ...]:
    """Those whose names have a text in them."""
    return tuple(each for each in wanted if only in str(each))
