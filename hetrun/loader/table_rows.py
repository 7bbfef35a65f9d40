"""Some rows of a table of vectors, read from the model's file when they are needed.

A row is some kilobytes, and the system keeps what was read: that costs no memory and next to no time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetrun.graph import Extent, Weight
from hetrun.loader.weight_reader import FileReader


class TableRows:
    """The rows of one weight."""

    def __init__(self, table: Weight) -> None:
        self._table, self._reader = table, FileReader()

    def __call__(self, numbers: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """The rows with these numbers, in this order; each is read once."""
        table, width = self._table, self._table.shape[1]
        own, places = np.unique(numbers, return_inverse=True)
        raw = np.empty((len(own), table.quant.row_bytes(width)), np.uint8)
        for i, row in enumerate(own.tolist()):
            self._read(row, raw[i])
        rows: NDArray[np.float32] = table.quant.dequantise(raw, width)[places]
        return rows

    def _read(self, row: int, out: NDArray[np.uint8]) -> None:
        whole = self._table.parts[0]
        if len(self._table.parts) == 1 and isinstance(whole, Extent):
            self._reader.fill(out.data, whole, row * whole.stride, self._table.name)
        else:
            self._reader.read(self._table.rows(row, row + 1), out)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()
