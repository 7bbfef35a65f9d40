"""Where the layers that keep states of a fixed size have them in a pass: what is read, and what is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetrun.backend import Floats, SequencePart
from hetrun.memory.kv.states import NONE


@dataclass(frozen=True, slots=True)
class Slots:
    """The states of one layer."""

    table: Tensor  # a row for each slot

    @classmethod
    def of(cls, table: Floats) -> Slots:
        """Those in a table of the cache."""
        return cls(torch.from_numpy(table))

    def before(self, part: SequencePart) -> Tensor:
        """What is known of a sequence before a pass: in its slot, where it must stay as it is."""
        assert part.states is not None
        read = part.states.read
        return torch.zeros(self.table.shape[1]) if read == NONE else self.table[read]

    def after(self, part: SequencePart, row: int) -> Tensor | None:
        """Where the state after a row of the pass is to be written; None if it is not to be kept."""
        assert part.states is not None
        slot = int(part.states.write[row - part.a])
        return None if slot == NONE else self.table[slot]


def pieces(part: SequencePart) -> Iterator[tuple[int, int]]:
    """The rows of a part, cut after each whose state is to be kept."""
    assert part.states is not None
    at = part.a
    for mark in (np.flatnonzero(part.states.write != NONE) + part.a + 1).tolist():
        yield at, mark
        at = mark
    if at < part.b:
        yield at, part.b
