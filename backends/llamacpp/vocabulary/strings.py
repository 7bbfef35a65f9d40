"""Questions about all strings of an array at once: a vocabulary may not cost milliseconds to check."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetrun.loader.formats.gguf import StringArray

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_WORD = 8
_ALL = (1 << 64) - 1
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(_WORD + 1)], np.uint64)
# Any odd numbers with ones and zeros all over them, for the first words of a string.
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


class Strings:
    """An array of strings, seen as bytes."""

    def __init__(self, array: StringArray) -> None:
        self.array = array
        self.starts: Ints = array.starts[:-1] + _WORD  # in front of each text lies its length
        self.lengths: Ints = array.starts[1:] - self.starts
        self.data: Bytes = np.frombuffer(array.blob + bytes(_WORD), np.uint8)

    def __len__(self) -> int:
        return len(self.array)

    def of_length(self, n: int) -> tuple[Ints, Bytes]:
        """Which strings have n bytes, and those bytes, a row each."""
        which = np.flatnonzero(self.lengths == n)
        return which, self.data[self.starts[which, None] + np.arange(n)]

    def first_twice(self) -> tuple[int, int] | None:
        """Where a text is for the first time there again, and where it was before; empty ones aside."""
        hashes = self._hashes()
        ordered = np.sort(hashes)
        again = ordered[1:][ordered[1:] == ordered[:-1]]
        if not len(again):
            return None
        seen: dict[bytes, int] = {}
        for i in np.flatnonzero(np.isin(hashes, again) & (self.lengths > 0)).tolist():
            before = seen.setdefault(self.array.raw(i), i)
            if before != i:
                return before, i
        return None

    def hold_nul(self) -> bool:
        """Whether a string has a NUL in it; as a rule only the lengths hold bytes of 0."""
        in_lengths = 8 * len(self) - np.count_nonzero(self.lengths.astype("<i8").view(np.uint8))
        return bool(len(self.data) - _WORD - np.count_nonzero(self.data) > in_lengths)

    def find(self, text: str) -> int | None:
        """Which string has this text."""
        raw = text.encode()
        which, rows = self.of_length(len(raw))
        found = which[(rows == np.frombuffer(raw, np.uint8)).all(axis=1)]
        return int(found[0]) if len(found) else None

    def _hashes(self) -> npt.NDArray[np.uint64]:
        """A number for each string, the same for the same text: a sum over its words of eight bytes."""
        words = np.ndarray((len(self.data) - _WORD + 1,), "<u8", self.data, strides=(1,))
        out = self.lengths.astype(np.uint64)
        which, starts, left = np.arange(len(self)), self.starts, self.lengths
        for factor in _FACTORS:
            out[which] += (words[starts] & _MASKS[np.minimum(left, _WORD)]) * factor
            longer = np.flatnonzero(left > _WORD)
            which, starts, left = which[longer], starts[longer] + _WORD, left[longer] - _WORD
        raw = self.array.raw
        out[which] = [hash(raw(i)) & _ALL for i in which.tolist()]  # a few of them are long
        return out
