"""SentencePiece's table of what characters become before they are cut into pieces.

It is an automaton over bytes, packed into an array, and the texts that it gives. The libraries that walk it
do not ask how far, and some end the process where it leads nowhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LONGEST_KEY = 64  # bytes that are replaced at once; those in use have up to 20
LONGEST_TEXT = 128  # bytes that come in their place; those in use have up to 33

_LABEL, _HAS_VALUE, _WIDE, _IS_VALUE = 0xFF, 1 << 8, 1 << 9, 1 << 31


def objection(raw: bytes) -> str | None:
    """What is wrong with a table, if something is."""
    size = _size(raw)
    if len(raw) < 4 or size % 4 or not 4 <= size < len(raw) - 4:
        return "its first four bytes are not the size of the table behind them"
    if raw[-1]:
        return "its last text has no end"
    if longest_text(raw) > LONGEST_TEXT:
        return f"it replaces characters by more than {LONGEST_TEXT} bytes"
    return _walk(np.frombuffer(raw, "<u4", size // 4, 4), len(raw) - 4 - size)


def longest_text(raw: bytes) -> int:
    """The bytes that come at most in the place of one."""
    ends = np.flatnonzero(np.frombuffer(raw, np.uint8, offset=4 + _size(raw)) == 0)
    return int(np.diff(ends, prepend=-1).max()) - 1


def _size(raw: bytes) -> int:
    return int.from_bytes(raw[:4], "little")


def _walk(units: npt.NDArray[np.uint32], n_text: int) -> str | None:
    """Follow every key from the root on, all of one length at a time."""
    n = len(units)
    index = np.arange(n, dtype=np.int64)
    wide = np.where(units & _WIDE, units >> 10 << 8, units >> 10).astype(np.int64)
    before = np.where(units & _IS_VALUE, -1, index ^ (units & _LABEL))  # the state that it continues
    before[(units & _LABEL) == 0] = -1  # no text goes on with a NUL
    after = index ^ wide
    reached = np.array([wide[0]])
    for _ in range(LONGEST_KEY + 1):
        if (reached | _LABEL).max() >= n:
            return "it leads to places outside of it"
        known = np.zeros(n + 1, bool)  # the last stands for "no state"
        known[reached] = True
        here = np.flatnonzero(known[before] & (before >= 0))
        if not len(here):
            return None
        values = after[here[(units[here] & _HAS_VALUE) != 0]]
        if len(values) and values.max() >= n:
            return "it leads to places outside of it"
        if len(values) and (units[values] & (_IS_VALUE - 1)).max() >= n_text:
            return "it leads to texts that it does not have"
        reached = np.unique(after[here])
    return f"it has keys of more than {LONGEST_KEY} bytes, or without an end"
