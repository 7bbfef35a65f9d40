"""Quantisation types by ggml itself: those of `graph.quant` and the conformance suite are held against it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetrun.backends.llamacpp import dequantize, ggml_api
from hetrun.graph.quant import QuantType

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


def packed_by_ggml(x: F32, quant: QuantType) -> U8:
    """Rows of a type, [rows, row_bytes]; all columns matter alike to the types that ask."""
    out = np.empty((len(x), quant.row_bytes(x.shape[1])), np.uint8)
    asks = ggml_api.library().ggml_quantize_requires_imatrix(quant.ggml_id)
    imatrix = np.ones(x.shape[1], np.float32) if asks else None
    dequantize.quantise(quant.ggml_id, np.ascontiguousarray(x), out, imatrix)
    return out


def unpacked_by_ggml(raw: U8, quant: QuantType, cols: int) -> F32:
    """Rows of floats, [rows, cols], by ggml's routine."""
    out = np.empty((len(raw), cols), np.float32)
    dequantize.dequantise(quant.ggml_id, np.ascontiguousarray(raw), out)
    return out
