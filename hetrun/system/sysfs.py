"""Small files that a kernel writes about the machine. What cannot be read says nothing, and is no error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hetrun.system.files import read_text

MOST_BYTES = 1 << 20
MOST_CPUS = 1 << 14  # numbers from there on are not believed


def lines_of(path: Path) -> list[str]:
    """The lines of a file; none where there is no such file, or none of text."""
    try:
        return read_text(path, MOST_BYTES).replace("\0", "").splitlines()
    except ValueError:
        return []


def line_of(path: Path) -> str:
    """The first line without blanks around it; nothing where there is none."""
    return next(iter(lines_of(path)), "").strip()


def number_of(path: Path) -> int | None:
    """A whole number, which may have a unit behind it as in "32768K"."""
    found = re.match(r"(-?\d{1,18})([KMG]?)", line_of(path))
    if not found:
        return None
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]]


def cpu_list(path: Path) -> frozenset[int]:
    """Numbers of CPUs as "0-3,8,16-31"."""
    return frozenset(_ranges(line_of(path)))


def cpu_mask(path: Path) -> frozenset[int]:
    """The same as bits, "00000000,0000ff0f", the last word first."""
    words = line_of(path).split(",")
    if not all(re.fullmatch(r"[0-9a-fA-F]{1,16}", word) for word in words):
        return frozenset()
    bits = int("".join(word.rjust(8, "0") for word in words), 16)
    return frozenset(at for at in range(min(bits.bit_length(), MOST_CPUS)) if bits >> at & 1)


def _ranges(text: str) -> Iterator[int]:
    for part in text.split(","):
        if found := re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part):
            first, last = int(found[1]), int(found[2] or found[1])
            yield from range(first, min(last + 1, MOST_CPUS))
