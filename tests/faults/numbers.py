"""Which of many calls fail."""

from __future__ import annotations


def chosen(count: int, most: int = 0) -> list[int]:
    """All from 1 to `count`; or about `most` of them: the first, the last two, and ever fewer between."""
    if not most or count <= most:
        return list(range(1, count + 1))
    first = max(1, most // 2)
    found = {*range(1, first + 1), count - 1, count}
    if (steps := most - len(found)) > 0:
        ratio = (count / first) ** (1 / (steps + 1))
        found |= {round(first * ratio**i) for i in range(1, steps + 1)}
    return sorted(found)
