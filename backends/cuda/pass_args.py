"""What a pass tells its kernels: tokens, positions, rows of the cache, what each query row sees.

The kernels of a segment are recorded once and run again, so all that changes lies in device memory, at
addresses that depend on the pass's shape only. It is packed here, once for all segments of a pass that are
told the same, and crosses with their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import Ints, Pass, PassShape
from hetrun.backends.cuda.attention_launch import LINES, ROW, TILE, TILED
from hetrun.backends.cuda.states.launch import PART, SPAN, SPAN_DTYPE
from hetrun.backends.cuda.states.mirror import StateAddresses
from hetrun.graph import Rows

FEW = 32  # rows up to which weights, and keys and values, are read for each few of them
ALIGNED = 16


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """An attention: which group of the cache it looks at, how many query rows each tile may have."""

    group: int
    window: int
    rows: Rows
    in_tile: int


class QueryRows:
    """The query rows of one kind of attention in passes of one shape: which go one by one, which in tiles."""

    def __init__(self, shape: PassShape, looking: AttentionTiles) -> None:
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
        """The first row and the number of rows: of all from `first` on, or of a window at their end."""
        if not self.looking.window:
            return first, end
        length = np.minimum(end, self.looking.window)
        return first + end - length, length


AXES = ("time", "height", "width")  # along which a token has a position


class PassPointers:
    """Where everything lies that passes of one shape tell."""

    def __init__(
        self,
        shape: PassShape,
        seeing: Sequence[QueryRows],
        groups: Sequence[int],
        has_states: bool = False,
        counts: int = 0,
    ) -> None:
        """`counts`: of blocks that have ended; kernels find zeros there, and leave zeros."""
        self.seeing, self._groups = seeing, groups
        parts, spans = _sequences(shape if has_states else PassShape(()))
        self.spans = len(spans)
        word, long = np.dtype(np.int32), np.dtype(np.int64)
        kinds: dict[str, tuple[np.dtype[Any], int]] = {"wanted": (word, shape.wanted)}
        kinds |= {name: (word, shape.tokens) for name in ("tokens", "positions", *AXES)}
        kinds |= {f"slots {g}": (long, shape.tokens) for g in groups}
        for i, s in enumerate(seeing):
            kinds |= {f"rows {i}": (ROW, s.rows), f"tiles {i}": (TILE, s.tiles)}
        kinds |= {"parts": (PART, len(parts)), "spans": (SPAN_DTYPE, len(spans))}
        kinds |= {"writes": (long, shape.tokens * has_states), "ended": (word, counts)}
        self._kinds, self._offsets = kinds, dict[str, int]()
        self.nbytes = 0
        for name, (kind, n) in kinds.items():
            self._offsets[name] = self.nbytes
            self.nbytes += -(-kind.itemsize * n // ALIGNED) * ALIGNED
        self._packed = np.zeros(self.nbytes, np.uint8)
        self._at = self.parts_of(self._packed)  # so that a pass has only numbers to write
        self._at["spans"][:], self._at["parts"][:] = spans, parts
        for i, s in enumerate(seeing):
            s.begin(self._at[f"rows {i}"], self._at[f"tiles {i}"])

    def offset(self, name: str) -> int:
        """Where something begins."""
        return self._offsets[name]

    def parts_of(self, packed: NDArray[np.uint8]) -> Mapping[str, NDArray[Any]]:
        """All that is told, by name, in memory where it lies."""
        found = dict[str, NDArray[Any]]()
        for name, (kind, n) in self._kinds.items():
            begin = self._offsets[name]
            found[name] = packed[begin : begin + kind.itemsize * n].view(kind)
        return found

    def told(self, work: Pass) -> NDArray[np.uint8]:
        """A pass's own but for where its states are, which differs from segment to segment."""
        found: NDArray[np.uint8] | None = work.worked_out.get(self)
        if found is None:
            found = work.worked_out[self] = self._pack(work).copy()
        return found

    def _pack(self, work: Pass) -> NDArray[np.uint8]:
        at = self._at
        at["tokens"][:], at["positions"][:], at["wanted"][:] = work.tokens, work.positions, work.wanted
        for axis, name in enumerate(AXES):
            at[name][:] = work.along(axis)
        for g in self._groups:
            at[f"slots {g}"][:] = work.slots[g]
        for i, s in enumerate(self.seeing):
            s.fill(work, at[f"rows {i}"], at[f"tiles {i}"])
        return self._packed


def tell_places(at: Mapping[str, NDArray[Any]], places: StateAddresses) -> None:
    """Where a segment finds and leaves states, where it looks for that."""
    at["parts"]["read"], at["writes"][:] = places.read, places.write


class Tellers:
    """The same one for all segments that look at the same in passes of one shape."""

    def __init__(self) -> None:
        self._seeing: WeakValueDictionary[tuple[PassShape, AttentionTiles], QueryRows] = WeakValueDictionary()
        self._made: WeakValueDictionary[object, PassPointers] = WeakValueDictionary()

    def seeing(self, shape: PassShape, looking: AttentionTiles) -> QueryRows:
        """The query rows of an attention."""
        found = self._seeing.get((shape, looking))
        if found is None:
            found = self._seeing[shape, looking] = QueryRows(shape, looking)
        return found

    def of(
        self,
        shape: PassShape,
        seeing: Sequence[QueryRows],
        groups: tuple[int, ...],
        has_states: bool,
        counts: int,
    ) -> PassPointers:
        """Where all that lies."""
        kinds = tuple(s.looking for s in seeing)
        key = shape, kinds, groups, has_states, counts
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = PassPointers(shape, seeing, groups, has_states, counts)
        return found


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
