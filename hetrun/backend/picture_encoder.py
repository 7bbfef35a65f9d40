"""What turns a picture into rows of embeddings: the vision tower of a model, inside some library.

All of it runs on the engine's thread, but for `cancel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hetrun.loader.vision import NoVision as NoVision, Vision as Vision
from hetrun.pictures.picture import Picture

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Words(NamedTuple):
    """Tokens that belong around a picture, such as <|vision_start|>."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """What a picture, or one part of it, takes in the prompt."""

    count: int
    places: Ints  # [count, 3]: time, height, width, from 0 on, to be added to the place where it begins
    advance: int  # by how much the next token's place is further; `count` where positions are plain
    whole: bool  # its rows see each other (not causal): all of them must be in one pass
    key: object  # for `encode`


Piece = Words | PromptRows


class PictureEncoder(Protocol):
    """A loaded vision tower."""

    width: int  # of rows: the text model's, times (1 + deepstack)
    deepstack: int  # further blocks of a row, one for each of the first layers
    spatial: bool  # places matter (M-RoPE)

    @property
    def nbytes(self) -> int:
        """What it holds now: its weights, and work memory as the largest picture so far wanted it."""
        ...

    def lay_out(self, picture: Picture) -> tuple[Piece, ...]:
        """What stands for a picture in the prompt: its rows, and the words around them."""
        ...

    def encode(self, rows: PromptRows) -> Floats:
        """The rows of a part that `lay_out` made, [count, width]; Cancelled after `cancel`."""
        ...

    def bytes_for(self, width: int, height: int) -> int:
        """Memory that laying out and encoding a picture of this size takes at most, beside `nbytes`."""
        ...

    def cancel(self) -> None:
        """End the call of `encode` that is going on, from any thread; it raises Cancelled."""
        ...

    def rearm(self) -> None:
        """Forget a cancel, so that the next call runs."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class PictureSetup(NamedTuple):
    """How a tower is to be opened."""

    vision: Vision
    threads: int
    tokenize: Callable[[str], Sequence[int]]  # the text model's tokens of a word such as <|vision_start|>
    most_tokens: int = (
        0  # rows of a picture at most, where the tower scales pictures; 0: what it was made for
    )


class Pictures(NamedTuple):
    """What a backend offers that encodes pictures.

    `open` loads a tower. `bytes_for` says before that what a picture of a width and a height will take.
    `try_out`, on any thread, may take seconds for a file that was not tried before, which `open` would take
    otherwise; ModelFileError says what is wrong with it.
    """

    open: Callable[[PictureSetup], PictureEncoder]
    bytes_for: Callable[[PictureSetup, int, int], int]
    try_out: Callable[[PictureSetup], None] = lambda setup: None
