"""Random weights in any quantisation type, as its own packer or ggml's would write them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetrun.backends.llamacpp import types
from hetrun.quant import QuantType

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


def packed(x: F32, quant: QuantType) -> U8:
    """Rows of a type, [rows, row_bytes]; hetrun's own packers are ggml's, bit for bit."""
    return packed_by_ggml(x, quant) if quant.pack is None else quant.quantise(x)


def packed_by_ggml(x: F32, quant: QuantType) -> U8:
    """The same from ggml; all columns matter alike to the types that ask."""
    out = np.empty((len(x), quant.row_bytes(x.shape[1])), np.uint8)
    imatrix = np.ones(x.shape[1], np.float32) if types.types().needs_imatrix(quant.ggml_id) else None
    types.quantise(quant.ggml_id, np.ascontiguousarray(x), out, imatrix)
    return out


def unpacked_by_ggml(raw: U8, quant: QuantType, cols: int) -> F32:
    """Rows of floats, [rows, cols], by ggml's routine."""
    out = np.empty((len(raw), cols), np.float32)
    types.dequantise(quant.ggml_id, np.ascontiguousarray(raw), out)
    return out
