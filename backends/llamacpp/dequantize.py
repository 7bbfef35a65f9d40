"""ggml's own routines for its quantisation types, as the services `dequantise` and `quantise`.

They work on the calling thread and let go of the interpreter lock, so that several threads can work on rows
of one tensor at once. Only the search grids of some IQ types are computed by a pool of OpenMP threads, when
such a type is first quantised to; ggml makes them once, behind a lock of its own.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import numpy as np
from numpy.typing import NDArray

from hetrun.backends.llamacpp import ggml_api
from hetrun.graph.quant import by_ggml_id

_RowFunction = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)


def dequantise(ggml_id: int, raw: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Fill `out` with the weights of whole blocks."""
    quant = by_ggml_id(ggml_id)  # ggml itself trusts the number, and the sizes
    _check(raw, np.uint8, quant.row_bytes(out.size), "blocks")
    _check(out, np.float32, out.size, "weights")
    traits = ggml_api.library().ggml_get_type_traits(ggml_id) if ggml_id < ggml_api.TYPES else None
    address = traits.contents.to_float if traits else None
    if not address:
        raise ValueError(f"ggml has no routine that dequantises {quant.name}")
    _RowFunction(address)(raw.ctypes.data, out.ctypes.data, out.size)


def quantise(
    ggml_id: int,
    x: NDArray[np.float32],
    out: NDArray[np.uint8],
    imatrix: NDArray[np.float32] | None = None,
) -> None:
    """Pack rows of weights; `imatrix` says how much each column matters, and some types need to know."""
    lib, quant = ggml_api.library(), by_ggml_id(ggml_id)
    rows, cols = x.shape
    _check(x, np.float32, x.size, "weights")
    _check(out, np.uint8, rows * quant.row_bytes(cols), "blocks")
    if imatrix is not None:
        _check(imatrix, np.float32, cols, "importance matrix")
    elif lib.ggml_quantize_requires_imatrix(ggml_id):
        raise ValueError(f"{quant.name} cannot be made without an importance matrix")
    if quant.block > 1 and not _finite(x):
        # Some of ggml's searches end the process when they meet one.
        raise ValueError(f"weights that are infinite or not a number cannot be quantised to {quant.name}")
    importance = None if imatrix is None else imatrix.ctypes.data
    done = lib.ggml_quantize_chunk(ggml_id, x.ctypes.data, out.ctypes.data, 0, rows, cols, importance)
    assert done == out.nbytes, f"ggml packed {rows} x {cols} {quant.name} weights into {done} bytes"


def _check(array: NDArray[np.generic], dtype: type[np.generic], size: int, what: str) -> None:
    """ggml gets an address and a count, so both must be what they are said to be."""
    if array.dtype != dtype or array.size != size or not array.flags.c_contiguous:
        raise ValueError(
            f"the {what} must be {size} contiguous {dtype.__name__}, not {array.dtype} {array.shape}"
        )


def _finite(x: NDArray[np.float32]) -> bool:
    """A finite sum has only finite parts; others are looked at one by one, because large ones overflow."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(x.sum()) or np.isfinite(x).all())
