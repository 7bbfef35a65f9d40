"""What a pass tells its kernels: tokens, positions, rows of the cache, what each query row sees.

The kernels of a segment are recorded once and run again, so all that changes lies in device memory, at
addresses that depend on the pass's shape only. It is packed here and crosses as one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import Ints, Pass, PassShape
from hetrun.backends.cuda.attention_launch import LINES, ROW, TILE, TILED
from hetrun.backends.cuda.states.launch import PART, SPAN, SPAN_DTYPE
from hetrun.backends.cuda.states.mirror import Places
from hetrun.graph import Rows

FEW = 32  # rows up to which weights, and keys and values, are read for each few of them
ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Looking:
    """An attention: which group of the cache it looks at, how many query rows each tile may have."""

    group: int
    window: int
    rows: Rows
    in_tile: int


class Seeing:
    """The query rows of one kind of attention in passes of one shape: which go one by one, which in tiles."""

    def __init__(self, shape: PassShape, looking: Looking) -> None:
        self.looking = looking
        one_by_one, tiles, at = [], list[tuple[int, int, int, int]](), 0
        for number, (tokens, wanted) in enumerate(shape.parts):
            n = tokens if looking.rows == "tokens" else wanted
            # Wanted rows may lie anywhere, unless they are all that there are.
            if n <= FEW or n < tokens or not looking.in_tile:
                one_by_one.append(np.array([(at + i, number, i) for i in range(n)], np.int64).reshape(-1, 3))
            else:
                step = looking.in_tile
                tiles += [(at + a, min(step, n - a), number, a) for a in range(0, n, step)]
            at += n
        rows = np.concatenate(one_by_one) if one_by_one else np.empty((0, 3), np.int64)
        self._q, self._part, self._index = rows.T
        self._tiles = np.array(tiles, np.int64).reshape(-1, 4)
        self.rows, self.tiles = len(rows), len(tiles)

    def begin(self, rows: NDArray[np.void], tiles: NDArray[np.void]) -> None:
        """What all passes have in the structures of the kernels."""
        rows["q"] = self._q
        tiles["q"], tiles["rows"], _, _ = self._tiles.T
        tiles["window"] = self.looking.window

    def fill(self, work: Pass, rows: NDArray[np.void], tiles: NDArray[np.void]) -> None:
        """What a pass has there besides."""
        g = self.looking.group
        # By part: the first row of its view, and how many rows its first token sees of it.
        first = np.array([p.kv[g].first for p in work.parts], np.int64)
        sees = np.array([p.kv[g].length - (p.b - p.a) + 1 for p in work.parts], np.int64)
        if self.rows:
            index = self._index
            if self.looking.rows == "wanted":
                index = work.wanted[self._q] - np.array([p.a for p in work.parts])[self._part]
            rows["first"], rows["length"] = self._seen(first[self._part], sees[self._part] + index)
        if self.tiles:
            _, _, part, start = self._tiles.T
            tiles["first"], tiles["length"] = self._seen(first[part], sees[part] + start)

    def _seen(self, first: Ints, end: Ints) -> tuple[Ints, Ints]:
        """The first row and the number of them, of so many rows from one on or of a window's at their end."""
        if not self.looking.window:
            return first, end
        length = np.minimum(end, self.looking.window)
        return first + end - length, length


AXES = ("time", "height", "width")  # along which a token has a position


class Given:
    """Where everything lies that passes of one shape tell."""

    def __init__(
        self, shape: PassShape, seeing: Sequence[Seeing], groups: Sequence[int], has_states: bool = False
    ) -> None:
        self._seeing, self._groups = seeing, groups
        parts, spans = _sequences(shape if has_states else PassShape(()))
        self.spans = len(spans)
        word, long = np.dtype(np.int32), np.dtype(np.int64)
        kinds: dict[str, tuple[np.dtype[Any], int]] = {"wanted": (word, shape.wanted)}
        kinds |= {name: (word, shape.tokens) for name in ("tokens", "positions", *AXES)}
        kinds |= {f"slots {g}": (long, shape.tokens) for g in groups}
        for i, s in enumerate(seeing):
            kinds |= {f"rows {i}": (ROW, s.rows), f"tiles {i}": (TILE, s.tiles)}
        kinds |= {"parts": (PART, len(parts)), "spans": (SPAN_DTYPE, len(spans))}
        kinds["writes"] = long, shape.tokens * has_states
        self._offsets: dict[str, int] = {}
        self.nbytes = 0
        for name, (kind, n) in kinds.items():
            self._offsets[name] = self.nbytes
            self.nbytes += -(-kind.itemsize * n // ALIGNED) * ALIGNED
        self._packed = np.zeros(self.nbytes, np.uint8)
        self._at: dict[str, NDArray[Any]] = {}  # parts of it, so that a pass has only numbers to write
        for name, (kind, n) in kinds.items():
            begin = self._offsets[name]
            self._at[name] = self._packed[begin : begin + kind.itemsize * n].view(kind)
        self._at["spans"][:], self._at["parts"][:] = spans, parts
        for i, s in enumerate(seeing):
            s.begin(self._at[f"rows {i}"], self._at[f"tiles {i}"])

    def offset(self, name: str) -> int:
        """Where something begins."""
        return self._offsets[name]

    def pack(self, work: Pass, places: Places | None = None) -> NDArray[np.uint8]:
        """A pass's own, and where its states are; good until the next one."""
        at = self._at
        at["tokens"][:], at["positions"][:], at["wanted"][:] = work.tokens, work.positions, work.wanted
        for axis, name in enumerate(AXES):
            at[name][:] = work.along(axis)
        for g in self._groups:
            at[f"slots {g}"][:] = work.slots[g]
        for i, s in enumerate(self._seeing):
            s.fill(work, at[f"rows {i}"], at[f"tiles {i}"])
        if places:
            at["parts"]["read"] = places.read
            at["writes"][:] = places.write
        return self._packed


def _sequences(shape: PassShape) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """The tokens of each sequence, and these in spans of some that follow each other."""
    sizes = [tokens for tokens, _ in shape.parts]
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    parts, spans = np.zeros(len(sizes), PART), list[tuple[int, int, int, int]]()
    for i, (n, end) in enumerate(zip(sizes, ends, strict=True)):
        parts[i] = end - n, end, 0
        spans += [(a, min(SPAN, end - a), i, 0) for a in range(end - n, end, SPAN)]
    return parts, np.array(spans, SPAN_DTYPE)


def in_tile(heads_of_kv: int, head: int) -> int:
    """Query rows of a tile; 0 where no tile takes such heads."""
    return 0 if head % 16 or head > TILED else LINES // heads_of_kv
