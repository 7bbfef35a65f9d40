"""Small pictures as lines of a terminal: in half blocks anywhere, in pixels where a terminal can do that.

Why so: docs/adr/0065-pictures-in-the-terminal.md.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

from rich.color import Color
from rich.color_triplet import ColorTriplet
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from hetrun.pictures.picture import Picture
from hetrun.tui.transcript.markdown import lines_of, plain_lines

COLUMNS, ROWS = 32, 10  # at most, of a picture
LEAST_WIDTH = 8  # columns; below that words have to do
PIXELS = 320, 200  # of what is kept: as many as such a place has in most fonts
GAP = 2  # columns between two pictures
LEAST_BESIDE = 20  # columns of each; with fewer they stand one below the other
HALF = "▀"
# Terminals that draw a picture where its placeholders stand, so that it scrolls and is cut as text is. Others
# have Kitty's protocol without these.
WITH_PLACEHOLDERS = ("xterm-kitty", "xterm-ghostty")
DELETE = "\x1b_Ga=d,d=I,i={},q=2\x1b\\"


class Thumbnail(NamedTuple):
    """A picture made small, and its size before."""

    width: int
    height: int
    columns: int  # pixels of what is kept
    rows: int
    rgb: bytes


class ThumbnailCells(NamedTuple):
    """Cells of a picture."""

    columns: int
    rows: int


Paint = Callable[[Thumbnail, ThumbnailCells], Sequence[Strip]]


def reduced(picture: Picture) -> Thumbnail:
    """A picture with as many pixels as are shown."""
    from PIL import Image  # takes 50 ms; nothing waits for them on a thread

    image = Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)
    image.thumbnail(PIXELS, reducing_gap=2.0)
    return Thumbnail(picture.width, picture.height, *image.size, image.tobytes())


def place_for(width: int, height: int, columns: int) -> ThumbnailCells:
    """Cells for a picture of this size, which is never made larger; a cell is twice as high as wide."""
    scale = min(1.0, min(columns, COLUMNS) / width, 2 * ROWS / height)
    return ThumbnailCells(max(round(width * scale), 1), max(round(height * scale / 2), 1))


def in_half_blocks(small: Thumbnail, place: ThumbnailCells) -> Sequence[Strip]:
    """Two pixels in each cell: the upper one is the ink, the lower one the paper."""
    from PIL import Image

    image = Image.frombytes("RGB", (small.columns, small.rows), small.rgb)
    wide = 3 * place.columns
    rgb = image.resize((place.columns, 2 * place.rows), Image.Resampling.BOX).tobytes()
    rows = [rgb[at : at + wide] for at in range(0, len(rgb), wide)]
    return [
        Strip(
            [Segment(HALF, _style(upper[at : at + 3], lower[at : at + 3])) for at in range(0, len(upper), 3)],
            place.columns,
        )
        for upper, lower in zip(rows[::2], rows[1::2], strict=True)
    ]


@lru_cache(4096)
def _style(ink: bytes, paper: bytes) -> Style:
    return Style(color=_colour(ink), bgcolor=_colour(paper))


def _colour(rgb: bytes) -> Color:
    return Color.from_triplet(ColorTriplet(*rgb))


class KittyPainter:
    """Pixels, by Kitty's protocol: the picture is sent once, and its placeholders are text."""

    def __init__(self, send: Callable[[str], object]) -> None:
        self._send = send
        self._numbers: list[int] = []

    @staticmethod
    def prepare() -> None:
        """Import what it needs; on any thread."""
        with unheard():
            import textual_image.renderable  # noqa: F401

    def __call__(self, small: Thumbnail, place: ThumbnailCells) -> Sequence[Strip]:
        from PIL import Image

        image = Image.frombytes("RGB", (small.columns, small.rows), small.rgb)
        with unheard() as said:
            from textual_image.renderable import TGPImage

            drawing = TGPImage(image, place.columns, place.rows)
            strips = lines_of(drawing, place.columns)
        self._send(said.getvalue())
        if drawing.terminal_image_id is not None:
            self._numbers.append(drawing.terminal_image_id)
        return strips

    def close(self) -> None:
        """The terminal need not keep them any more."""
        self._send("".join(map(DELETE.format, self._numbers)))
        self._numbers.clear()


_silence = threading.Lock()


@contextmanager
def unheard() -> Iterator[io.StringIO]:
    """textual-image asks the terminal what it can do when it is imported, and reads the answer from the keys;
    later it writes past Textual. Without a terminal it asks nothing, and what it writes is ours to send."""
    with _silence:
        terminal, said = sys.__stdout__, io.StringIO()
        sys.__stdout__ = said  # type: ignore[misc, assignment]
        try:
            yield said
        finally:
            sys.__stdout__ = terminal  # type: ignore[misc]


def has_placeholders(environ: Mapping[str, str]) -> bool:
    """Whether the terminal is one of those, by what it says of itself: asking could put rubbish into the box,
    where an answer is late. What stands between (tmux, screen) has another TERM."""
    return environ.get("TERM") in WITH_PLACEHOLDERS


class Card:
    """A picture of a turn, with its words below."""

    def __init__(self, words: str, width: int, height: int, paint: Paint) -> None:
        self.words = words
        self.small: Thumbnail | None = None
        self.trouble = ""  # why there is no picture to be seen
        self._size = width, height
        self._paint = paint
        self._painted: tuple[Thumbnail, ThumbnailCells, Sequence[Strip]] | None = None

    def show(self, found: Thumbnail | str | None) -> None:
        """This, or why it cannot be shown, or nothing yet."""
        if isinstance(found, str):
            self.trouble = found
        else:
            self.small = found

    @property
    def is_shown(self) -> bool:
        return self.small is not None or bool(self.trouble)

    def lines(self, columns: int) -> list[Strip]:
        """In at most this many columns. What is to come has its place already, so that nothing moves then."""
        words = plain_lines(" · ".join(filter(None, (self.words, self.trouble))), columns, "dim")
        if columns < LEAST_WIDTH or self.trouble:
            return words
        return [*self._picture(columns), *words]

    def _picture(self, columns: int) -> Sequence[Strip]:
        small = self.small
        width, height = (small.width, small.height) if small else self._size
        if not (width and height):
            return ()
        place = place_for(width, height, columns)
        if small is None:
            return [Strip.blank(place.columns)] * place.rows
        if self._painted is None or self._painted[:2] != (small, place):
            self._painted = small, place, self._paint(small, place)
        return self._painted[2]


def side_by_side(cards: Sequence[Card], width: int) -> list[Strip]:
    """Several pictures, as many in a row as have room."""
    if len(cards) == 1:
        return [*cards[0].lines(width), Strip.blank(0)]
    n = min(max((width + GAP) // (LEAST_BESIDE + GAP), 1), len(cards))
    columns = min(COLUMNS, (width + GAP) // n - GAP)
    found: list[Strip] = []
    for at in range(0, len(cards), n):
        drawn = [card.lines(columns) for card in cards[at : at + n]]
        for row in range(max(map(len, drawn))):
            parts = [lines[row] if row < len(lines) else Strip.blank(0) for lines in drawn]
            found.append(Strip.join([part.adjust_cell_length(columns + GAP) for part in parts]))
        found.append(Strip.blank(0))
    return found
