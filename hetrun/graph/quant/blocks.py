"""What functions that unpack and pack blocks have in common."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# By how much to shift bytes down for their parts of four, two and one bits.
NIBBLES = np.array([0, 4], np.uint8)
PAIRS = np.array([0, 2, 4, 6], np.uint8)
BITS = np.arange(8, dtype=np.uint8)


def half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block, as float32 [blocks, 1]."""
    value: Floats = blocks[:, at : at + 2].view("<f2").astype(np.float32)
    return value


def put_half(blocks: Bytes, at: int, value: Floats) -> None:
    """Write a float16 to byte `at` of every block."""
    blocks[:, at : at + 2] = value.astype("<f2").view(np.uint8)
