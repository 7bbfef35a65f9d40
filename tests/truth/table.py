"""The table as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hetrun.system.terminal_text import align_columns
from tests.truth.placements import Placement
from tests.truth.verdicts import Cell


@dataclass(frozen=True)
class Line:
    """A model in all placements that were asked for."""

    name: str
    cells: tuple[Cell, ...]

    @property
    def faults(self) -> list[str]:
        return [f"{self.name}, {cell.placement}: {fault}" for cell in self.cells for fault in cell.faults]

    def as_json(self) -> dict[str, Any]:
        return {"model": self.name, "cells": [c.as_json() for c in self.cells], "faults": self.faults}


def as_text(lines: Sequence[Line], columns: Sequence[Placement]) -> str:
    """A table for each group of columns, and one of what they took."""
    return "\n\n".join("\n".join(align_columns(rows)) for rows in tables(lines, columns))


def tables(lines: Sequence[Line], columns: Sequence[Placement]) -> Iterator[list[tuple[str, ...]]]:
    for _, group in groupby(enumerate(columns), key=lambda pair: pair[1].group):
        places = [i for i, _ in group]
        head = ("model", *(columns[i].name for i in places))
        last = ("seconds", *(f"{sum(line.cells[i].seconds for line in lines):.0f}" for i in places))
        yield [head, *((line.name, *(line.cells[i].in_short() for i in places)) for line in lines), last]


def downwards(line: Line) -> str:
    """A single model, a line for each placement."""
    rows = [(line.name, "", "mean KL", "bits", "seconds")]
    for cell in line.cells:
        divergence = max((c.kl or 0.0 for c in cell.checks if c.bar.kind == "close"), default=0.0)
        exact = [c.same_bits for c in cell.checks if c.bar.kind == "bits"]
        bits = ("the same" if all(exact) else "others") if exact else ""
        rows.append((cell.placement, cell.verdict, f"{divergence:.5f}", bits, f"{cell.seconds:.0f}"))
    return "\n".join(align_columns(rows))
