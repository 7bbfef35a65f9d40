"""Random weights in any quantisation type, as its own packer or ggml's would write them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import BackendUnavailable
from hetrun.graph.quant import QuantType
from hetrun.system import entry_points

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Quantiser = Callable[[int, F32, U8], None]  # ggml's number of the type, rows of weights, where they go

# Before ggml packs the first row of these it computes grids, for up to half a minute.
SLOW = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S")
# Packing takes the longest of all: a large matrix has this many different rows, in a random order.
DIFFERENT = 256


def random_weights(rows: int, cols: int, quant: QuantType, rng: np.random.Generator) -> U8:
    """A matrix by which a product is about as large as what it multiplies."""
    numbers = rng.standard_normal((min(rows, DIFFERENT), cols), dtype=np.float32) * np.float32(cols**-0.5)
    raw = packed(numbers, quant)
    return raw if rows <= DIFFERENT else raw[rng.integers(0, DIFFERENT, rows)]


def packed(x: F32, quant: QuantType) -> U8:
    """Rows of a type, [rows, row_bytes]; hetrun's own packers are ggml's, bit for bit.

    The slow types get random blocks, for which any bytes do, that spread as widely as x. They depend on
    each row alone, so that rows in another order are the same rows. BackendUnavailable where a type is
    packed, or read, by ggml only and nothing provides ggml.
    """
    if quant.name not in SLOW:
        return _by_service(x, quant) if quant.pack is None else quant.quantise(x)
    width = quant.row_bytes(x.shape[1])
    rows = [np.random.default_rng(zlib.crc32(row.tobytes())).integers(0, 256, width, np.uint8) for row in x]
    raw = np.stack(rows)
    _scale(raw, quant, np.ones(len(x)))
    _scale(raw, quant, x.std(axis=1) / quant.dequantise(raw, x.shape[1]).std(axis=1))
    return raw


def _by_service(x: F32, quant: QuantType) -> U8:
    found = cast("Quantiser | None", entry_points.named("services", "quantise"))
    if found is None:
        raise BackendUnavailable("nothing provides hetrun.services:quantise; reinstall hetrun")
    out = np.empty((len(x), quant.row_bytes(x.shape[1])), np.uint8)
    found(quant.ggml_id, np.ascontiguousarray(x), out)
    return out


def _scale(raw: U8, quant: QuantType, scales: NDArray[np.floating]) -> None:
    """Give the blocks of each row this scale."""
    halves = np.repeat(scales, raw.shape[1] // quant.block_bytes).astype("<f2")[:, None]
    blocks = raw.reshape(-1, quant.block_bytes)
    if quant.name != "IQ1_M":
        blocks[:, :2] = halves.view(np.uint8)
        return
    # Its bits are the highest four of each of the last four words.
    words = blocks[:, 48:].view("<u2")
    words[:] = (words & 0x0FFF) | ((halves.view("<u2") >> np.array([0, 4, 8, 12], "<u2")) << 12)
