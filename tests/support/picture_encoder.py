"""An encoder of pictures in numpy, for tests of what uses one: each row is a fixed map of the mean colour
of a square of pixels and of its place.

It is as honest as a vision tower: other pixels give other rows, and each row has its place.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hetrun.backend import Floats
from hetrun.backend.picture_encoder import Pictures, PictureSetup, Piece, PromptRows, Words
from hetrun.errors import Cancelled, PictureError
from hetrun.pictures.picture import Picture

SIDE = 8  # pixels of the side of a square
COLOURS = 3


def drawn(width: int, height: int, seed: int = 0) -> Picture:
    """A picture, the same every time."""
    pixels = np.random.default_rng(seed).integers(0, 256, 3 * width * height, np.uint8)
    return Picture.of(width, height, pixels.tobytes())


def file_of(picture: Picture) -> bytes:
    """A file that `decode` reads."""
    return struct.pack("<II", picture.width, picture.height) + picture.rgb


def decode(file: bytes) -> Picture:
    """The picture of a file."""
    width, height = struct.unpack_from("<II", file)
    if len(file) != 8 + 3 * width * height:
        raise PictureError("the picture is cut off")
    return Picture.of(width, height, file[8:])


@dataclass
class LinearEncoder:
    """The encoder, which counts what it did."""

    width: int  # of rows
    spatial: bool = True
    whole: bool = False
    deepstack: int = 0
    nbytes: int = 1 << 20
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # tokens before and after a picture
    parts: int = 1  # into which a picture is cut, from top to bottom
    before: Callable[[], object] = lambda: None  # called in the middle of encoding
    more: int = 0  # bytes that it takes for a picture
    opened: int = 0
    closed: int = 0
    encoded: list[bytes] = field(default_factory=list)  # digests
    threads: set[int] = field(default_factory=set)
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def pictures(self) -> Pictures:
        """As a backend offers it."""
        return Pictures(self._open, lambda setup, width, height: self.bytes_for(width, height))

    def _open(self, setup: PictureSetup) -> LinearEncoder:
        self.threads.add(threading.get_ident())
        self.opened += 1
        return self

    def lay_out(self, picture: Picture) -> tuple[Piece, ...]:
        self.threads.add(threading.get_ident())
        wide, tall = max(1, picture.width // SIDE), max(1, picture.height // SIDE)
        colours = np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, COLOURS)
        found: list[Piece] = [Words(self.around[0])] if self.around[0] else []
        for band in np.array_split(np.arange(tall), self.parts):
            high, across = (
                a.reshape(-1) for a in np.meshgrid(np.arange(len(band)), np.arange(wide), indexing="ij")
            )
            count = len(high)
            means = [
                colours[SIDE * (band[0] + y) : SIDE * (band[0] + y + 1), SIDE * x : SIDE * (x + 1)].mean(
                    (0, 1)
                )
                for y, x in zip(high, across, strict=True)
            ]
            if self.spatial:
                places, advance = np.stack([np.zeros(count, np.int64), high, across], 1), max(len(band), wide)
            else:
                places, advance = np.repeat(np.arange(count)[:, None], 3, 1), count
            key = picture.digest, np.array(means, np.float32)
            found.append(PromptRows(count, places, advance, self.whole, key))
        return (*found, *([Words(self.around[1])] if self.around[1] else []))

    def encode(self, rows: PromptRows) -> Floats:
        self.threads.add(threading.get_ident())
        assert isinstance(rows.key, tuple)
        digest, means = rows.key
        self.before()
        if self.cancelled.is_set():
            raise Cancelled("stopped")
        self.encoded.append(digest)
        said = np.concatenate([means / 128 - 1, rows.places / 8], 1)
        table = np.random.default_rng(1).standard_normal((said.shape[1], self.width))
        made: Floats = np.tanh(said @ table).astype(np.float32)
        return made

    def bytes_for(self, width: int, height: int) -> int:
        return 12 * width * height + self.more

    def cancel(self) -> None:
        self.cancelled.set()

    def rearm(self) -> None:
        self.cancelled.clear()

    def close(self) -> None:
        self.closed += 1
