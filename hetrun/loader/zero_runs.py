"""Holes in weights: long runs of zero bytes, which interrupted downloads and failing disks leave.

Zeros may also be meant: biases, rows of a padded vocabulary, experts that were removed. Those are whole rows.
A hole begins and ends anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hetrun.graph.quant import Bytes

SHORTEST = 4096  # bytes: what is lost is lost in pages, at least
LONG = 1 << 16  # bytes that are a hole in any case, also within a row
SLACK = 64  # bytes beside whole rows: weights next to them may be zero by chance
WORD = 8  # bytes
EVERY = 64  # words: one of these shows whether a slice may have a long run


@dataclass(frozen=True, slots=True)
class Zeros:
    """Long runs of zero bytes in one tensor."""

    is_all: bool = False  # there is nothing else in it
    hole_bytes: int = 0  # in runs that are no whole rows
    hole_row: int = 0  # where the first of these begins
    rows: int = 0  # that are zero as a whole
    first_row: int = 0  # the first of these
    hole_begin: int = field(default=0, compare=False)  # bytes of the tensor before the first hole


class ZeroFinder:
    """Takes the bytes of a tensor in order and remembers its long runs of zeros, as sums."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self._rows, self._row_bytes = rows, row_bytes
        # A row may begin or end with columns of zeros; so a hole is longer than a row.
        self._least = min(max(SHORTEST, row_bytes), LONG)
        self._at = self._begin = 0  # bytes taken; the end of the last ones that are not zero
        self._holes, self._zero_rows = [0, 0, 0], [0, 0, 0]  # how much; the row and the byte of the first

    def take(self, raw: Bytes) -> None:
        """The next bytes."""
        n = len(raw) // WORD * WORD
        self._take_words(raw[:n].view("<u8"))
        self._at += n
        if raw[n:].any():
            self._end_run(self._at, len(raw) - n)
        self._at += len(raw) - n

    def _take_words(self, words: npt.NDArray[np.uint64]) -> None:
        there = words != 0
        if not there.any():
            return
        if np.count_nonzero(there[::EVERY]) > len(there[::EVERY]) - (SHORTEST // (EVERY * WORD) - 1):
            # No long run in the middle: what matters are the first and the last that are not zero.
            self._end_run(self._at + WORD * int(there.argmax()), 0)
            self._begin = self._at + WORD * (len(there) - int(there[::-1].argmax()))
            return
        ends = np.flatnonzero(there) * WORD + self._at
        starts = np.concatenate(([self._begin], ends[:-1] + WORD))
        for i in np.flatnonzero(ends - starts >= self._least):
            self._add(int(starts[i]), int(ends[i]))
        self._begin = int(ends[-1]) + WORD

    def _end_run(self, at: int, nbytes: int) -> None:
        """Bytes that are not zero come here."""
        if at - self._begin >= self._least:
            self._add(self._begin, at)
        self._begin = at + nbytes

    def _add(self, begin: int, end: int) -> None:
        size = self._row_bytes
        first, last = -(-(begin - SLACK) // size), (end + SLACK) // size  # the rows between them are zero
        first, last = max(0, first), min(last, self._rows)
        if abs(first * size - begin) <= SLACK and abs(end - last * size) <= SLACK and last > first:
            found, much, row = self._zero_rows, last - first, first
        else:
            found, much, row = self._holes, end - begin, begin // size
        if not found[0]:
            found[1:] = row, begin
        found[0] += much

    def found(self) -> Zeros:
        """After all bytes."""
        if not self._begin:
            return Zeros(is_all=True)
        self._end_run(self._at, 0)
        (much, row, begin), (rows, first_row, _) = self._holes, self._zero_rows
        return Zeros(False, much, row, rows, first_row, begin)
