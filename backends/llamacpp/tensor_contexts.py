"""ggml contexts for tensors without memory of their own, in memory that hetrun asks for.

ggml does not look whether it got memory for a context, and ends the process. So there are few contexts, each
over an array of ours, which is a MemoryError where the system has nothing left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from hetrun.backends.llamacpp import ggml_api
from hetrun.backends.llamacpp.ggml_api import GgmlLibrary

ALIGNMENT = 16  # GGML_MEM_ALIGN
ROOM = 64  # tensors of one context


class TensorContexts:
    """Contexts of one backend's tensors: those that stay, and those that only a question is about."""

    def __init__(self, lib: GgmlLibrary) -> None:
        self._lib = lib
        self._contexts: list[int] = []
        self._memory: list[NDArray[np.uint8]] = []
        self._left = 0  # tensors that the last context has room for
        self._staying = self._scratch = 0

    def lasting(self) -> int:
        """A context with room for a tensor that stays until `close`."""
        if not self._left:
            self._staying, self._left = self._make(ROOM), ROOM
        self._left -= 1
        return self._staying

    @contextmanager
    def scratch(self) -> Iterator[int]:
        """An empty context for a few tensors, which are gone afterwards. Not for use within itself."""
        self._scratch = self._scratch or self._make(ROOM)
        try:
            yield self._scratch
        finally:
            self._lib.ggml_reset(self._scratch)

    def _make(self, tensors: int) -> int:
        size = tensors * self._lib.ggml_tensor_overhead()
        memory = np.empty(size + ALIGNMENT, np.uint8)
        address = -(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT
        context: int = self._lib.ggml_init(ggml_api.InitParams(size, address, True))
        self._contexts.append(context)
        self._memory.append(memory)
        return context

    def close(self) -> None:
        """Give everything back."""
        for context in self._contexts:
            self._lib.ggml_free(context)
        self._contexts, self._memory = [], []
        self._left = self._staying = self._scratch = 0
