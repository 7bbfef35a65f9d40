"""What a vision tower takes in memory while it encodes a picture, by its numbers: measured, with a margin."""

from __future__ import annotations

import math
from typing import NamedTuple

from hetrun.backend.picture_encoder import Vision

FLOAT, HALF = 4, 2
COPIES = 3.1  # of the picture's bytes, while it is scaled: two of it, and one that is as wide as the result
FIXED = 8 << 20  # the graph's own description, and what allocators round up


class EncodingMemory(NamedTuple):
    """Bytes that encoding takes at most, one phase after the other."""

    scaling: int  # while the picture is scaled
    kept: int  # the graph's work memory, which stays
    beside: int  # what there is besides, while the graph runs

    def more_than(self, kept: int) -> int:
        """What it takes where so much work memory is there already, in which nothing can be scaled."""
        return max(self.scaling, max(0, self.kept - kept) + self.beside)


def encoding_bytes(vision: Vision, width: int, height: int, limits: tuple[int, int]) -> EncodingMemory:
    """For a picture of this size, with the fewest and the most rows that are allowed."""
    tower = vision.tower
    rows = most_rows(tower.grain, width, height, limits)
    patches = rows * tower.merge**2
    pixels = patches * tower.patch**2
    scaled = 3 * FLOAT * pixels
    e, ffn = tower.width, tower.ffn or 4 * tower.width
    # What lives at once in a layer: attention has the stream, its norm, q, k and v, the same turned, and k
    # and v in half; the rest has the stream, its norm and what its two or three products make.
    layer = FLOAT * (max(10 * e, 5 * e + (3 if tower.gated else 2) * ffn) if tower.layers else 5 * e)
    merged = FLOAT * 3 * e
    patched = (HALF if tower.layers else 2 * FLOAT) * 3 * tower.patch**2
    made = 2 * rows * vision.width * FLOAT
    kept = patches * (layer + merged + patched) + made + scaled + FIXED
    scaling = int(COPIES * 3 * width * height) + 3 * pixels + scaled + FIXED
    return EncodingMemory(scaling, kept, scaled + made)


def most_rows(grain: int, width: int, height: int, limits: tuple[int, int]) -> int:
    """Rows that a picture takes at most: each side is rounded to whole ones."""
    least, most = limits
    across = math.ceil(width / grain) + 1, math.ceil(height / grain) + 1
    # Where it is made larger, each side may become one row longer.
    larger = (
        math.ceil(math.sqrt(least * width / height)) + 1,
        math.ceil(math.sqrt(least * height / width)) + 1,
    )
    return min(most, max(across[0] * across[1], larger[0] * larger[1]))
