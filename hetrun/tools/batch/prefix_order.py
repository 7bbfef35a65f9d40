"""The order in which requests are begun: those that begin alike one behind the other.

What they begin with is then computed once, and is still there for the next. The first of each family comes
where it stood in the file, so that results in the file's order need not wait for long.
"""

from __future__ import annotations

from collections.abc import Sequence

PART = 64  # bytes by which texts are compared: some ten tokens


def by_beginnings(texts: Sequence[bytes]) -> list[int]:
    """The numbers of the texts in that order: down a tree of their parts, older branches first."""
    first: dict[int, int] = {}
    keys = []
    for number, text in enumerate(texts):
        ends = range(PART, len(text) + PART, PART)
        # A beginning is known by its hash: it may be long, and there are as many as the text has parts.
        state, key = 0, []
        for end in ends:
            state = hash((state, text[end - PART : end]))
            key.append(first.setdefault(state, number))
        keys.append((*key, number))
    return sorted(range(len(texts)), key=keys.__getitem__)
