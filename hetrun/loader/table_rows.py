"""Some rows of a table of vectors, read from the model's file when they are needed.

A row is some kilobytes, and the system keeps what was read: that costs no memory and next to no time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetrun.graph import Weight
from hetrun.loader.weight_reader import FileReader


class TableRows:
    """The rows of one weight."""

    def __init__(self, table: Weight) -> None:
        self._table, self._reader = table, FileReader()

    def __call__(self, numbers: Sequence[int]) -> NDArray[np.float32]:
        """The rows with these numbers, in this order."""
        table, width = self._table, self._table.shape[1]
        raw = np.empty((len(numbers), table.quant.row_bytes(width)), np.uint8)
        for i, row in enumerate(numbers):
            self._reader.read(table.rows(row, row + 1), raw[i])
        return table.quant.dequantise(raw, width)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()
