"""Where layers that keep states of a fixed size have them in a pass: which are read, which are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hetrun.backend import Floats, SequencePart
from hetrun.memory.kv.states import NONE


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer."""

    table: Tensor  # a row for each slot

    @classmethod
    def of(cls, table: Floats) -> LayerStates:
        """Those in a table of the cache."""
        return cls(torch.from_numpy(table))

    def before(self, part: SequencePart) -> Tensor:
        """What is known of a sequence before a pass: in its slot, where it must stay as it is."""
        assert part.states is not None
        read = part.states.read
        return torch.zeros(self.table.shape[1]) if read == NONE else self.table[read]

    def after(self, part: SequencePart, n: int) -> Tensor | None:
        """Where the state after n of a part's tokens is to be written; None if it is not to be kept."""
        assert part.states is not None
        slot = int(part.states.write[n - 1])
        return None if slot == NONE else self.table[slot]


def pieces(part: SequencePart) -> Iterator[tuple[int, int]]:
    """The tokens of a part, cut after each whose state is to be kept."""
    assert part.states is not None
    marks = np.flatnonzero(part.states.write != NONE) + 1
    yield from pairwise(dict.fromkeys((0, *marks.tolist(), part.b - part.a)))
