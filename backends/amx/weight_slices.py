"""Weights on their way from a file: read slice by slice, turned into floats by ggml's routine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import Floats, Ints, ReadInto
from hetrun.errors import BackendUnavailable
from hetrun.graph import Weight
from hetrun.graph.quant import QuantType
from hetrun.graph.quant.external import provided

Bytes = NDArray[np.uint8]

IN_CACHE = 1 << 18  # numbers that are turned into floats before they are used: they stay in a core's cache


def dequantise(quant: QuantType, raw: Bytes, out: Floats) -> None:
    """Fill `out` [rows, cols] with rows of bytes: by ggml's routine where it is installed, else in numpy."""
    if quant.name == "F32":
        out.reshape(-1)[:] = raw.reshape(-1).view("<f4")
        return
    service = provided() if raw.flags.c_contiguous and out.flags.c_contiguous else None
    if service:
        try:
            service(quant.ggml_id, raw.reshape(-1), out.reshape(-1))
            return
        except BackendUnavailable:  # ggml cannot be loaded here: numpy knows most types
            pass
    out[:] = quant.dequantise(raw, out.shape[1])


def floats(weight: Weight, read: ReadInto) -> Floats:
    """A small weight as floats."""
    raw = stored(weight, read)
    out = np.empty(weight.shape, np.float32)
    dequantise(weight.quant, raw, out)
    return out


def stored(weight: Weight, read: ReadInto) -> Bytes:
    """The bytes of a weight, row by row."""
    raw = np.empty((weight.shape[0], weight.quant.row_bytes(weight.shape[1])), np.uint8)
    read(weight, raw.reshape(-1))
    return raw


def slices(weight: Weight, read: ReadInto) -> Iterator[tuple[int, int, Floats]]:
    """Rows a to b of a weight as floats, in memory that the next slice overwrites."""
    rows, cols = weight.shape
    step = min(rows, max(1, IN_CACHE // cols))
    raw = np.empty((step, weight.quant.row_bytes(cols)), np.uint8)
    out = np.empty((step, cols), np.float32)
    for a, b in spans(rows, step):
        read(weight.rows(a, b), raw[: b - a].reshape(-1))
        dequantise(weight.quant, raw[: b - a], out[: b - a])
        yield a, b, out[: b - a]


def spans(n: int, step: int) -> Sequence[tuple[int, int]]:
    """0 to n in pieces of `step`."""
    return [(a, min(a + step, n)) for a in range(0, n, step)]


class StoredRows:
    """A table whose rows are looked up: kept as it is stored, a row becomes floats when it is asked for."""

    def __init__(self, weight: Weight, read: ReadInto) -> None:
        self.raw = stored(weight, read)
        self.quant = weight.quant
        self.width = weight.shape[1]

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return int(self.raw.nbytes)

    def rows(self, index: Ints) -> Floats:
        """Some of the rows."""
        out = np.empty((len(index), self.width), np.float32)
        dequantise(self.quant, self.raw[index], out)
        return out
