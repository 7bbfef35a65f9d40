"""Where the bytes of pieces lie in files, and where they come to lie in a slot of the ring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetrun.backend.weight_streaming import Piece, PieceOffsets
from hetrun.graph import Extent, Part
from hetrun.prefetch.ring_buffer import MOST_EXTENTS, PAGE, PIECE


@dataclass(frozen=True, slots=True)
class FileExtent:
    """Neighbouring bytes of a file."""

    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """A piece in a slot: what is read, where its first byte comes to lie, and how much room that takes."""

    reads: tuple[tuple[FileExtent, int, int], ...]  # with `at` and `to` (ring_reader.h)
    place: PieceOffsets
    nbytes: int


def stretches(piece: Piece, run: tuple[int, int]) -> tuple[FileExtent, ...] | None:
    """The rows of one run in files, in their order; None if some are in no file, or not row after row."""
    found: list[FileExtent] = []
    for part in piece.weight.rows(*run).parts:
        if not isinstance(part, Extent) or (part.rows > 1 and part.stride != part.row_bytes):
            return None
        found.append(FileExtent(part.path, part.offset, part.rows * part.row_bytes))
    return tuple(_joined(found))


def _joined(found: Iterable[FileExtent]) -> Iterator[FileExtent]:
    """What follows each other in a file is one read."""
    last = None
    for each in found:
        if last and (last.path, last.offset + last.nbytes) == (each.path, each.offset):
            last = FileExtent(last.path, last.offset, last.nbytes + each.nbytes)
            continue
        if last:
            yield last
        last = each
    if last:
        yield last


def lay_out(piece: Piece) -> SlotLayout | None:
    """Each stretch is read with the pages around it, to the beginning of a page; None if a slot cannot hold
    what comes of that."""
    reads: list[tuple[FileExtent, int, int]] = []
    starts: list[int] = []
    end = room = 0
    for run in piece.runs:
        found = stretches(piece, run)
        if found is None:
            return None
        for i, each in enumerate(found):
            at, skip = whole_pages(end), each.offset % PAGE
            to = end if i else at + skip  # a run's rows must follow each other
            if not i:
                starts.append(to)
            reads.append((each, at, to))
            end = to + each.nbytes
            room = max(room, at + whole_pages(skip + each.nbytes))
    if len(reads) > MOST_EXTENTS:
        return None
    return SlotLayout(tuple(reads), PieceOffsets(tuple(starts)), room)


def can_stream(piece: Piece) -> bool:
    """Whether a piece can come from disk for every pass: its rows lie in files, in a few places."""
    return lay_out(piece) is not None


def whole_pages(nbytes: int) -> int:
    """A number of bytes, rounded up to pages."""
    return -(-nbytes // PAGE) * PAGE


def table(laid: Iterable[SlotLayout | None], files: Mapping[str, int]) -> NDArray[np.void]:
    """As ring_reader.c wants it, of type PIECE; pieces that cannot be streamed have no extents."""
    everything = list(laid)
    found = np.zeros(len(everything), PIECE)
    for row, each in zip(found, everything, strict=True):
        reads = each.reads if each else ()
        row["count"] = len(reads)
        for i, (stretch, at, to) in enumerate(reads):
            row["extents"][i] = files[stretch.path], stretch.offset, stretch.nbytes, at, to
    return found


def extents(piece: Piece) -> Iterator[tuple[Part, int, int]]:
    """All that a piece consists of, and where it begins and ends in its stored bytes, run after run."""
    at = 0
    for run in piece.runs:
        for part in piece.weight.rows(*run).parts:
            end = at + part.rows * part.row_bytes
            yield part, at, end
            at = end
