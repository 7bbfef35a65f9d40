"""cuBLAS through ctypes: four calls of it.

CuPy's own wrapper sets the stream before every call, and that makes cuBLAS forget the memory it was told to
work in: it would take more than was granted, and none of it could be part of a graph.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_size_t, c_void_p

from hetrun.backends.cuda.driver import Address, DeviceProduct, Stream
from hetrun.backends.cuda.nvrtc import installed
from hetrun.errors import BackendError
from hetrun.system.native_library import Prototypes

WORKSPACE = 32 << 20  # bytes that cuBLAS works in: what NVIDIA recommends for Hopper
TRANSPOSED, PLAIN = 1, 0
BF16, F32 = 14, 0  # cudaDataType
SUMS_IN_F32 = 68  # cublasComputeType
BY_ITSELF = -1  # cublasGemmAlgo: it chooses
FUNCTIONS: Prototypes = {
    "cublasGemmEx": (
        *(c_int, c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p),
        *(c_void_p, c_int, c_int, c_void_p, c_int, c_int),
        *(c_void_p, c_void_p, c_int, c_int, c_int, c_int),
    )
}


class Cublas:
    """A handle of one device, for one stream."""

    def __init__(self, stream: Stream, workspace: Address) -> None:
        self._library = library()
        self._handle = c_void_p()
        self._call("cublasCreate_v2", byref(self._handle))
        self._call("cublasSetStream_v2", self._handle, c_void_p(stream))
        # Behind the stream, which resets it.
        self._call("cublasSetWorkspace_v2", self._handle, c_void_p(workspace), c_size_t(WORKSPACE))

    def multiply(self, p: DeviceProduct) -> None:
        """Row by row here is column by column there: the same numbers, transposed."""
        self._call(
            "cublasGemmEx",
            self._handle,
            TRANSPOSED,
            PLAIN,
            p.out,
            p.rows,
            p.inner,
            byref(c_float(1.0)),
            c_void_p(p.w),
            BF16,
            p.inner,
            c_void_p(p.x),
            BF16,
            p.inner,
            byref(c_float(float(p.add))),
            c_void_p(p.c),
            F32,
            p.ldc,
            SUMS_IN_F32,
            BY_ITSELF,
        )

    def close(self) -> None:
        """Give the handle back."""
        self._call("cublasDestroy_v2", self._handle)

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise BackendError(f"{name} of cuBLAS failed with status {status}")


def library() -> ctypes.CDLL:
    """The installed one."""
    return installed("cublas", "cuBLAS is not installed: pip install nvidia-cublas", FUNCTIONS)
