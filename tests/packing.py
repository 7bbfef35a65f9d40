"""Random weights in any quantisation type, as its own packer or ggml's would write them."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from hetrun.backends.llamacpp import native, types
from hetrun.quant import QuantType

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


# Before ggml packs the first row of these it computes grids, for up to half a minute.
SLOW = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S")


def packed(x: F32, quant: QuantType) -> U8:
    """Rows of a type, [rows, row_bytes]; hetrun's own packers are ggml's, bit for bit.

    The slow types get random blocks, for which any bytes do, that spread as widely as x. They depend on
    each row alone, so that rows in another order are the same rows.
    """
    if quant.name not in SLOW:
        return packed_by_ggml(x, quant) if quant.pack is None else quant.quantise(x)
    width = quant.row_bytes(x.shape[1])
    rows = [np.random.default_rng(zlib.crc32(row.tobytes())).integers(0, 256, width, np.uint8) for row in x]
    raw = np.stack(rows)
    _scale(raw, quant, np.ones(len(x)))
    _scale(raw, quant, x.std(axis=1) / quant.dequantise(raw, x.shape[1]).std(axis=1))
    return raw


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


def packed_by_ggml(x: F32, quant: QuantType) -> U8:
    """The same from ggml; all columns matter alike to the types that ask."""
    out = np.empty((len(x), quant.row_bytes(x.shape[1])), np.uint8)
    asks = native.library().ggml_quantize_requires_imatrix(quant.ggml_id)
    imatrix = np.ones(x.shape[1], np.float32) if asks else None
    types.quantise(quant.ggml_id, np.ascontiguousarray(x), out, imatrix)
    return out


def unpacked_by_ggml(raw: U8, quant: QuantType, cols: int) -> F32:
    """Rows of floats, [rows, cols], by ggml's routine."""
    out = np.empty((len(raw), cols), np.float32)
    types.dequantise(quant.ggml_id, np.ascontiguousarray(raw), out)
    return out
