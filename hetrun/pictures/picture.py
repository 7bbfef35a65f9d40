"""A picture as encoders take it."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple


class Picture(NamedTuple):
    """Pixels, row by row from the top: a byte each of red, green and blue."""

    width: int
    height: int
    rgb: bytes
    digest: bytes  # equal for equal pixels, whatever file they came from

    @classmethod
    def of(cls, width: int, height: int, rgb: bytes) -> Picture:
        """A picture with its digest."""
        if len(rgb) != 3 * width * height:
            raise ValueError(f"{len(rgb)} bytes are not {width} x {height} pixels")
        digest = sha256(width.to_bytes(4, "little") + height.to_bytes(4, "little") + rgb).digest()
        return cls(width, height, rgb, digest)
