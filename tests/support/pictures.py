"""Small pictures for tests."""

from __future__ import annotations

import struct
import zlib


def png(width: int, height: int, red: int = 200) -> bytes:
    """A PNG file: red from the left to the right, and blue downwards."""
    rows = b"".join(
        b"\0" + b"".join(bytes([red * x // width, 60, 255 * y // height]) for x in range(width))
        for y in range(height)
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 0)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
