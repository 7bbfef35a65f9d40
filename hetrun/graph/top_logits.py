"""The greatest logits of some rows, which a device has chosen: all that most samplers look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TopCandidates:
    """Of one row: best first, equals by ascending id. What is no number comes before all that are."""

    ids: Ids
    logits: Floats


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The k greatest of each row."""

    ids: Ids
    logits: Floats

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> TopLogits:
        return TopLogits(self.ids[rows], self.logits[rows])

    def __iter__(self) -> Iterator[TopCandidates]:
        return map(TopCandidates, self.ids, self.logits)


Rows = Floats | TopLogits
