"""Where the experts of mixtures lie in files, expert by expert, and in the buffers that they are read to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hetrun.backend.weight_streaming import Mixture
from hetrun.graph import Extent, Weight
from hetrun.prefetch.extents import FileExtent, whole_pages
from hetrun.prefetch.ring_buffer import EXTENT, PAGE

MOST_KINDS = 8  # of slots
MATRICES = 3  # of an expert: gate, up, down
RECORD = np.dtype(
    [
        *((name, np.int64) for name in ("kind", "count")),
        ("extents", EXTENT, MATRICES),
        ("starts", np.int64, MATRICES),
    ]
)

Where = tuple[FileExtent, ...]  # of the matrices of one expert


@dataclass(frozen=True, eq=False)
class Records:
    """All experts of some mixtures, one mixture after the other."""

    mixtures: tuple[Mixture, ...]
    where: tuple[Where, ...]  # of each expert
    sizes: tuple[int, ...]  # of the slots of each kind; experts of one kind take equally much
    kinds: tuple[int, ...]  # of each mixture

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """Of each mixture the number of its first expert, and where the last one ends."""
        return np.cumsum([0, *(m.experts for m in self.mixtures)])

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many experts are of each kind."""
        return tuple(
            sum(m.experts for m, k in zip(self.mixtures, self.kinds, strict=True) if k == kind)
            for kind in range(len(self.sizes))
        )

    @cached_property
    def packed_bytes(self) -> int:
        """Memory that all of them would take."""
        return sum(size * count for size, count in zip(self.sizes, self.counts, strict=True))

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of all of them in their files."""
        return sum(part.nbytes for each in self.where for part in each)

    @cached_property
    def expert_bytes(self) -> tuple[int, ...]:
        """Stored bytes of an expert of each mixture."""
        return tuple(sum(part.nbytes for part in self.where[first]) for first in self.first[:-1])

    @cached_property
    def read_bytes(self) -> int:
        """Bytes of one read, on average over mixtures."""
        reads = [part.nbytes for first in self.first[:-1] for part, _ in _laid(self.where[first])[0]]
        return sum(reads) // len(reads)

    @cached_property
    def buffer_bytes(self) -> int:
        """What a buffer takes that any of them can be read to."""
        return max((_laid(each)[1] for each in {_shape(w): w for w in self.where}.values()), default=PAGE)

    def table(self, files: Mapping[str, int]) -> NDArray[np.void]:
        """As expert_slots.c wants it, of type RECORD."""
        found = np.zeros(len(self.where), RECORD)
        kinds = np.repeat(self.kinds, [m.experts for m in self.mixtures])
        for row, kind, where in zip(found, kinds, self.where, strict=True):
            reads, _, starts = _laid(where)
            row["kind"], row["count"], row["starts"] = kind, len(reads), starts
            for i, (stretch, at) in enumerate(reads):
                to = at + stretch.offset % PAGE
                row["extents"][i] = files[stretch.path], stretch.offset, stretch.nbytes, at, to
        return found


def records_of(mixtures: Sequence[Mixture]) -> Records | None:
    """The experts of these; None where a matrix of one does not lie in one place of a file."""
    where: list[Where] = []
    for mixture in mixtures:
        columns = [list(_matrices(weight, mixture.experts)) for weight in mixture.weights]
        if any(len(column) != mixture.experts for column in columns):
            return None
        where += zip(*columns, strict=True)
    if len({mixture.slot_bytes for mixture in mixtures}) > MOST_KINDS:
        return None
    sizes = sorted({mixture.slot_bytes for mixture in mixtures})
    kinds = tuple(sizes.index(mixture.slot_bytes) for mixture in mixtures)
    return Records(tuple(mixtures), tuple(where), tuple(sizes), kinds)


def _matrices(weight: Weight, experts: int) -> Iterator[FileExtent]:
    """Where each expert's rows lie; it ends early at one that is in several places, or in no file."""
    rows = weight.shape[0] // experts
    for part in weight.parts:
        if not isinstance(part, Extent) or part.rows % rows:
            return
        if part.rows > 1 and part.stride != part.row_bytes:
            return
        size = rows * part.row_bytes
        yield from (FileExtent(part.path, part.offset + i * size, size) for i in range(part.rows // rows))


def _laid(where: Where) -> tuple[list[tuple[FileExtent, int]], int, list[int]]:
    """Which bytes are read to which page of the buffer, what all of them take, and where the matrices begin:
    neighbours in a file are read together."""
    reads: list[tuple[FileExtent, int]] = []
    starts: list[int] = []
    end = 0
    for before, part in pairwise([None, *where]):
        assert part is not None
        gap = part.offset - before.offset - before.nbytes if before and before.path == part.path else -1
        if before and 0 <= gap < PAGE:  # no more than what brings it to a page
            last, at = reads[-1]
            reads[-1] = FileExtent(last.path, last.offset, last.nbytes + gap + part.nbytes), at
            starts.append(starts[-1] + before.nbytes + gap)
        else:
            reads.append((part, end))
            starts.append(end + part.offset % PAGE)
        stretch, at = reads[-1]
        end = at + whole_pages(stretch.offset % PAGE + stretch.nbytes)
    return reads, end, starts


def _shape(where: Where) -> tuple[object, ...]:
    """What the size of its buffer depends on."""
    begin = where[0].offset
    return tuple((part.path, part.offset % PAGE, part.offset - begin, part.nbytes) for part in where)
