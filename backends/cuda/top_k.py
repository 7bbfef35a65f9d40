"""The greatest logits of each row, found where they lie: `greatest_parts`, on (parts, rows) blocks,
and then `greatest`, on as many blocks as there are rows. The sizes are named in the source as well.
"""

from __future__ import annotations

import numpy as np

from hetrun.backend import TopLogits
from hetrun.backends.cuda.arena import in_arena
from hetrun.backends.cuda.kernel_cache import KernelLibrary, at, number
from hetrun.backends.cuda.memory import CudaMemory
from hetrun.backends.cuda.programs import Source
from hetrun.backends.cuda.result import DeviceResult

SMALL = Source("small")
SIZE = 4  # bytes of an id, and of a logit
MOST = 256  # numbers that can be asked for
THREADS = 256
SHARED = 8 * (8 * THREADS + 1)
PART = 4096  # numbers that are worth a block; a vocabulary then has enough of them for a good part of a GPU
MOST_PARTS = 64


def parts(width: int) -> int:
    """Parts that a row of `width` numbers is cut into."""
    return max(1, min(MOST_PARTS, width // PART))


def keys_bytes(rows: int, width: int, k: int) -> int:
    """What passes from one kernel to the other."""
    return 8 * rows * parts(width) * k


class TopKResult:
    """The k greatest of each row of a result, on their way home."""

    def __init__(self, memory: CudaMemory, library: KernelLibrary, result: DeviceResult, k: int) -> None:
        self._memory, self.name = memory, result.value.name
        (rows, width), driver = result.array.shape, memory.driver
        n, count = rows * k, parts(width)
        size = in_arena(keys_bytes(rows, width, k))
        self._keys = memory.take(size + 2 * SIZE * n, "greatest of rows")
        self._found = self._keys + size
        self._landing = driver.pinned(2 * SIZE * n)
        arguments = at(result.address), at(self._keys), number(width), number(k)
        last = at(self._keys), at(self._found), at(self._found + SIZE * n), number(count), number(k)
        self._launches = (
            library.launch(SMALL, "greatest_parts", (count, rows), THREADS, *arguments, shared=SHARED),
            library.launch(SMALL, "greatest", (rows,), THREADS, *last, shared=SHARED),
        )
        ids, logits = self._landing[: SIZE * n], self._landing[SIZE * n :]
        self.greatest = TopLogits(
            ids.view(np.int32).reshape(rows, k), logits.view(np.float32).reshape(rows, k)
        )

    def run(self) -> None:
        """Behind what makes the rows."""
        for launch in self._launches:
            self._memory.run(launch)
        target = int(self._landing.ctypes.data)
        self._memory.collect(target, self._found, len(self._landing))

    def close(self) -> None:
        """Give the memory back."""
        self._memory.give(self._keys)
