"""Weights of which only some pieces are in memory, in the layout of our own products.

All of a weight's addresses are reserved; a piece that stays is written there, one that is given up is memory
that the system takes back. So a product whose pieces are all there is the ordinary one, and another takes
what is missing from the supply (kernels/partial.h).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import gcd

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import WeightUse
from hetrun.backend.fusion import has_token_rows
from hetrun.backend.weight_streaming import Cut, Piece, PieceOffsets, Supply
from hetrun.backends.llamacpp import fusion
from hetrun.backends.llamacpp.epilogues import join
from hetrun.backends.llamacpp.fusion import StackedProduct
from hetrun.backends.llamacpp.kernels import matmul
from hetrun.backends.llamacpp.kernels.matmul import ROWS, MatmulLibrary
from hetrun.graph import Extent, Op, Value, Weight
from hetrun.system.address_space import ReservedMemory

PIECE = np.dtype([("first", np.int64), ("groups", np.int64), ("starts", np.int64, 2)])
Packs = Callable[[WeightUse], MatmulLibrary | None]


class PartialWeight:
    """One weight, as products see it."""

    def __init__(self, pieces: Sequence[Piece], places: Mapping[Piece, PieceOffsets], supply: int) -> None:
        table = np.zeros(len(pieces), PIECE)
        for row, piece in zip(table, pieces, strict=True):
            a, b = piece.runs[0]
            row["first"], row["groups"] = a // ROWS, -(-(b - a) // ROWS)
            row["starts"][: len(piece.runs)] = places[piece].starts
        self._table = table
        self._ranks = np.full(len(pieces), -1, np.int32)
        self._taken = np.zeros(len(pieces), np.int32)
        self._made = matmul.PartialWeightStruct(
            supply=supply,
            pieces=len(pieces),
            piece=table.ctypes.data,
            rank=self._ranks.ctypes.data,
            taken=self._taken.ctypes.data,
        )

    @property
    def address(self) -> int:
        """Of its struct partial."""
        return ctypes.addressof(self._made)

    def follow(self, ranks: Mapping[int, int]) -> None:
        """Take the pieces with these numbers from the supply, and find all others in memory."""
        self._ranks[:] = -1
        self._ranks[list(ranks)] = list(ranks.values())
        self._made.streamed = len(ranks)

    def forget(self) -> None:
        """A product has ended in the middle: the next one begins with its first unit."""
        self._taken[:] = 0


class PartialWeights:
    """All of them; see hetrun.backend.weight_streaming.PartialCompute."""

    def __init__(self, products: MatmulLibrary, packs: Packs) -> None:
        self._products = products
        self._packs = packs
        self.memory: ReservedMemory | None = None
        self._at: dict[Weight, int] = {}  # where each begins in that memory
        self._weights: dict[Weight, PartialWeight] = {}
        # The weight of each piece, and its number there; by identity, since to hash a piece takes long.
        self._places: dict[int, tuple[PartialWeight, int]] = {}
        self._files: Mapping[str, int] = {}
        self._lookups: frozenset[Weight] = frozenset()
        self.supply: Supply | None = None

    # --- how weights are cut

    def cut(self, ops: Sequence[Op], writes: Sequence[Value], most_bytes: int) -> Cut | None:
        """Pieces in the order of the products of one segment."""
        items = join(fusion.fuse(ops), writes, lambda use: bool(self._packs(use)))
        products = [item for item in items if isinstance(item, StackedProduct) and self._packs(item.use)]
        found = [(has_token_rows(fusion.members(item)), self._pieces(item, most_bytes)) for item in products]
        order = [of_tokens for of_tokens, _ in found]
        if not found or order != sorted(order, reverse=True):
            return None
        always = sum(len(pieces) for of_tokens, pieces in found if of_tokens)
        # The head comes last: nothing reads logits.
        heads = [item.ops[0].kind == "head" for item in products]
        head = sum(len(pieces) for of_head, (_, pieces) in zip(heads, found, strict=True) if of_head)
        if heads != sorted(heads):
            return None
        whole = {
            use.weight for item in items if not isinstance(item, StackedProduct) for use in fusion.uses(item)
        }
        lookups = {
            use.weight
            for op in ops
            for use in fusion.uses(op)
            if use.use == "lookup" and self._packs(use) and _in_one_place(use.weight)
        }
        # A product's weight that is a table as well can be partial if its rows can be read by themselves.
        if any(item.weight in whole - lookups for item in products):
            return None
        return Cut(tuple(piece for _, pieces in found for piece in pieces), always, tuple(lookups), head)

    def _pieces(self, item: StackedProduct, most_bytes: int) -> list[Piece]:
        weight, halves = item.weight, 2 if item.gate else 1
        rows = weight.shape[0] // halves
        ends = np.cumsum([op.weights[0].shape[0] for op in item.ops]).tolist()
        if halves == 2 or any(end % ROWS for end in ends[:-1]):
            members = [(item.ops[0], 0, rows)]
        else:
            members = [(op, a, b) for op, (a, b) in zip(item.ops, pairwise([0, *ends]), strict=True)]
        pieces = []
        for op, first, end in members:
            step = self._rows_at_once(weight, end - first, halves, most_bytes)
            for a in range(first, end, step):
                b = min(a + step, end)
                runs = tuple((a + half * rows, b + half * rows) for half in range(halves))
                pieces.append(Piece(op.scope, weight, runs, halves * self._packed_bytes(weight, b - a)))
        return pieces

    def _rows_at_once(self, weight: Weight, rows: int, halves: int, most_bytes: int) -> int:
        """Rows of a piece: about as many in each, and whole pages once they are packed, if that can be."""
        row_bytes = weight.quant.row_bytes(weight.shape[1])
        unit = ROWS * (mmap.PAGESIZE // gcd(self._packed_bytes(weight, ROWS), mmap.PAGESIZE))
        if unit * row_bytes * halves > most_bytes:
            unit = ROWS
        pieces = -(-rows // max(unit, most_bytes // (row_bytes * halves) // unit * unit))
        return -(-rows // (pieces * unit)) * unit

    def _packed_bytes(self, weight: Weight, rows: int) -> int:
        return self._products.packed_bytes(weight.quant.ggml_id, (rows, weight.shape[1]))

    # --- what is in memory

    def prepare(
        self, cut: Cut, supply: Supply, places: Mapping[Piece, PieceOffsets], files: Mapping[str, int]
    ) -> None:
        """Reserve addresses."""
        self.supply, self._files, self._lookups = supply, files, frozenset(cut.lookups)
        pieces: dict[Weight, list[Piece]] = {}
        for piece in cut.pieces:
            pieces.setdefault(piece.weight, []).append(piece)
        end = 0
        for weight, mine in pieces.items():
            self._at[weight], end = end, end + _whole_pages(self._packed_bytes(weight, weight.shape[0]))
            partial = self._weights[weight] = PartialWeight(mine, places, supply.address)
            self._places |= {id(piece): (partial, i) for i, piece in enumerate(mine)}
        self.memory = ReservedMemory(end)

    def has(self, use: WeightUse) -> bool:
        """Whether a weight is one of these."""
        return use.weight in self._weights or (use.use == "lookup" and use.weight in self._lookups)

    def address(self, weight: Weight) -> int:
        """Where a weight lies, as far as it is in memory; 0 for a table of which only rows are read."""
        assert self.memory is not None
        return self.memory.address + self._at[weight] if weight in self._at else 0

    def of(self, weight: Weight) -> PartialWeight | None:
        """What products need to know of a weight; None for one that is in memory as a whole."""
        return self._weights.get(weight)

    def row_source(self, weight: Weight) -> tuple[int, int, int] | None:
        """Where single rows of a table are read: the supply, the file's number, the first row's position."""
        part = weight.parts[0]
        if self.supply is None or weight not in self._lookups or not isinstance(part, Extent):
            return None
        return self.supply.address, self._files[part.path], part.offset

    def keep(self, piece: Piece, stored: NDArray[np.uint8]) -> None:
        """Pack a piece to where it belongs."""
        assert self.memory is not None
        weight, at = piece.weight, 0
        for a, b in piece.runs:
            shape = (b - a, weight.shape[1])
            raw = stored[at : at + (b - a) * weight.quant.row_bytes(weight.shape[1])]
            to = self.memory.view(*self._extent(weight, a, b))
            self._products.pack(weight.quant.ggml_id, shape, raw, to)
            at += raw.nbytes

    def drop(self, piece: Piece) -> None:
        """Give the memory of a piece back."""
        assert self.memory is not None
        for a, b in piece.runs:
            self.memory.drop(*self._extent(piece.weight, a, b))

    def settle(self, pieces: Sequence[Piece]) -> None:
        """These are in memory and going to stay there."""
        assert self.memory is not None
        extents = sorted(self._extent(p.weight, a, b) for p in pieces for a, b in p.runs)
        first = end = 0
        for at, size in [*extents, (sys.maxsize, 0)]:
            if at > end + mmap.PAGESIZE:  # weights begin on pages of their own
                self.memory.settle(first, end - first)
                first = at
            end = at + size

    def _extent(self, weight: Weight, a: int, b: int) -> tuple[int, int]:
        """Where packed rows lie: the first byte and how many."""
        return self._at[weight] + self._packed_bytes(weight, a), self._packed_bytes(weight, b - a)

    def follow(self, streamed: Sequence[Piece]) -> None:
        """Take these pieces from the supply, and find all others in memory."""
        ranks: dict[int, dict[int, int]] = {id(weight): {} for weight in self._weights.values()}
        for rank, piece in enumerate(streamed):
            weight, number = self._places[id(piece)]
            ranks[id(weight)][number] = rank
        for weight in self._weights.values():
            weight.follow(ranks[id(weight)])

    def forget(self) -> None:
        """A pass has ended in the middle."""
        for weight in self._weights.values():
            weight.forget()

    def close(self) -> None:
        """Give everything back."""
        if self.memory:
            self.memory.close()


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _in_one_place(weight: Weight) -> bool:
    """Whether row i begins i rows behind the first."""
    part = weight.parts[0]
    return len(weight.parts) == 1 and isinstance(part, Extent) and part.stride == part.row_bytes
