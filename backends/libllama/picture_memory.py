"""What a vision tower takes in memory while it encodes a picture, by its numbers: measured, with a margin."""

from __future__ import annotations

import math
from typing import NamedTuple

from hetrun.backend.picture_encoder import Vision

FLOAT, HALF = 4, 2
COPIES = 2.5  # of the picture's bytes, while it is scaled: the library's two, and one half as wide
FIXED = 12 << 20  # the graph's own description, and what allocators round up


class Needed(NamedTuple):
    """Bytes that encoding takes at most."""

    scaling: int  # while the picture is scaled, before the graph runs
    work: int  # of the graph; kept afterwards

    @property
    def total(self) -> int:
        """At its most."""
        return self.scaling + self.work


def encoding_bytes(vision: Vision, width: int, height: int, limits: tuple[int, int]) -> Needed:
    """For a picture of this size, where so few and so many rows are allowed."""
    tower = vision.tower
    rows = most_rows(tower.grain, width, height, limits)
    patches = rows * tower.merge**2
    pixels = patches * tower.patch**2
    seen = 3 * FLOAT * pixels  # as floats, for the graph
    scaling = int(COPIES * 3 * width * height) + 3 * pixels + seen
    ffn = tower.ffn or 4 * tower.width
    # A row of the stream, its norm, q, k and v, turned, and in half; or what lies between two products.
    layer = max(9 * tower.width * FLOAT, (3 * tower.width + 2 * ffn) * FLOAT)
    merged = 3 * tower.width * FLOAT
    stacked = rows * vision.width * FLOAT * (2 if vision.deepstack else 1)
    patched = 3 * tower.patch**2 * HALF
    graph = patches * (layer + merged + patched) + stacked + 2 * seen
    return Needed(scaling + rows * vision.width * FLOAT, graph + FIXED)


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
