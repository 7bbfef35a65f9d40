"""From a few measured sizes to any other.

For a fixed number of tokens, time is a line in depth: attention reads every key. For a fixed depth it bends
little between one measured number of tokens and the next. So cells with about as many tokens form a row; each
row says what it takes at the depth asked for, and between rows lie straight lines.

What a token pays for each key is found inside rows only, because rows differ in more than depth. What noise
alone could have made is taken off, so that work that reads no keys comes out flat. Then it is blended over
rows: the near and the certain ones count most.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2

from hetrun.planner.costmodel.timing_bin import Size, TimingBin

COMPUTING = 64  # tokens: passes of more take what their tokens take
LEAST_GROWTH = 0.3  # of a growth in proportion
ROUNDS = 3  # of finding the price of a key and that of a token in turn; each needs the other
PER_DOUBLING = 0.3  # how much the price of a key may change from one row to the next
TOKEN_PRICE = 0.3  # how far the price of a token inside a row may differ from that between rows


@dataclass(frozen=True, slots=True)
class FitPoint:
    """What one cell says."""

    tokens: float
    depth: float
    seconds: float
    variance: float

    @property
    def keys(self) -> float:
        """Keys that are read in all."""
        return self.tokens * self.depth


Row = tuple[FitPoint, ...]  # by depth


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds that each token pays for each key, and how certain that is."""

    value: float
    variance: float


class Fit:
    """Cells of one work as a function of tokens and depth."""

    def __init__(self, cells: Mapping[Size, TimingBin]) -> None:
        self.rows = _rows(cells)
        self.prices = _prices(self.rows)  # of a key, by row
        self._depths = [[p.depth for p in row] for row in self.rows]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def seconds(self, tokens: float, depth: float) -> float:
        """Below the fewest tokens that were measured time stays. Above the most it grows as it did before, at
        most in proportion."""
        i = bisect(range(len(self.rows)), tokens, key=lambda j: self._at(j, depth)[0])
        if i == 0:
            return self._at(0, depth)[1]
        n, seconds = self._at(i - 1, depth)
        if i == len(self.rows):
            return self._beyond(n, seconds, tokens, depth)
        more, later = self._at(i, depth)
        return seconds + (later - seconds) * (tokens - n) / (more - n)

    def _beyond(self, n: float, seconds: float, tokens: float, depth: float) -> float:
        """What more tokens take than were measured; `n` of them take `seconds`. Up to some size reading
        weights takes most of the time, and passes cost about the same."""
        in_proportion = seconds * tokens / n
        if n >= COMPUTING:
            return in_proportion
        grown = seconds
        if len(self.rows) > 1:
            fewer, before = self._at(-2, depth)
            grown += (seconds - before) * (tokens - n) / (n - fewer) if fewer < n else in_proportion
        return min(max(grown, LEAST_GROWTH * in_proportion), in_proportion)

    def span(self, depth: float) -> tuple[float, float]:
        """The fewest and the most tokens that were measured."""
        return self._at(0, depth)[0], self._at(-1, depth)[0]

    def _at(self, i: int, depth: float) -> tuple[float, float]:
        """Tokens that a row stands for at a depth, and the seconds they take."""
        row, price, depths = self.rows[i], self.prices[i], self._depths[i]
        j = bisect(depths, depth)
        if not 0 < j < len(row):
            p = row[max(j - 1, 0)]
            return p.tokens, p.seconds + price * p.tokens * (depth - p.depth)
        a, b = row[j - 1], row[j]
        share = (depth - a.depth) / (b.depth - a.depth)
        tokens = a.tokens + share * (b.tokens - a.tokens)
        free = a.seconds - price * a.keys, b.seconds - price * b.keys  # of what attention takes
        return tokens, free[0] + share * (free[1] - free[0]) + price * tokens * depth


def _rows(cells: Mapping[Size, TimingBin]) -> list[Row]:
    rows: dict[int, list[FitPoint]] = {}
    for (tokens, _), cell in sorted(cells.items()):
        if cell.runs:
            point = FitPoint(cell.tokens, cell.depth, cell.smoothed, cell.variance)
            rows.setdefault(tokens, []).append(point)
    return [tuple(sorted(row, key=lambda p: p.depth)) for row in rows.values()]


def _prices(rows: Sequence[Row]) -> list[float]:
    prices = [0.0] * len(rows)
    for _ in range(ROUNDS if any(len(row) > 1 for row in rows) else 0):
        own = [_own_price(row, token) for row, token in zip(rows, _token_prices(rows, prices), strict=True)]
        prices = [_blend(i, rows, own) for i in range(len(rows))]
    return prices


def _own_price(row: Row, token_price: float) -> Price | None:
    """The slope of a line through a row, over keys, once what its tokens cost is taken off."""
    middle = _mean([p.tokens for p in row])
    weights = [1 / (p.variance + (TOKEN_PRICE * token_price * (p.tokens - middle)) ** 2) for p in row]
    total = sum(weights)
    rest = [p.seconds - token_price * p.tokens for p in row]
    keys_middle = sum(w * p.keys for w, p in zip(weights, row, strict=True)) / total
    rest_middle = sum(w * r for w, r in zip(weights, rest, strict=True)) / total
    wide = sum(w * (p.keys - keys_middle) ** 2 for w, p in zip(weights, row, strict=True))
    if not wide > 0:
        return None
    both = sum(
        w * (p.keys - keys_middle) * (r - rest_middle) for w, p, r in zip(weights, row, rest, strict=True)
    )
    return _certain(both / wide, 1 / wide)


def _certain(value: float, variance: float) -> Price:
    """What is left of a price once that is taken off which noise alone could have made."""
    return Price(value * (1 - variance / value**2) if value > 0 and value**2 > variance else 0.0, variance)


def _blend(i: int, rows: Sequence[Row], own: Sequence[Price | None]) -> float:
    """The price of a key in a row, from all rows."""
    at = rows[i][0].tokens
    per_doubling = PER_DOUBLING * _mean([price.value for price in own if price] or [0.0])
    sums = weights = 0.0
    for row, price in zip(rows, own, strict=True):
        if price:
            away = per_doubling * log2(row[0].tokens / at)
            weight = 1 / (price.variance + away**2)
            sums += weight * price.value
            weights += weight
    if not weights:
        return 0.0
    # Reading keys is a part of the time, so it never takes more than all of it.
    return min(sums / weights, min((p.seconds / p.keys for p in rows[i] if p.keys), default=0.0))


def _token_prices(rows: Sequence[Row], prices: Sequence[float]) -> list[float]:
    """What one more token takes in each row, beside the keys it reads: the slope between its neighbours."""
    middles = [
        (_mean([p.tokens for p in row]), _mean([p.seconds - price * p.keys for p in row]))
        for row, price in zip(rows, prices, strict=True)
    ]
    found = []
    for i, (tokens, seconds) in enumerate(middles):
        (a, low), (b, high) = middles[max(i - 1, 0)], middles[min(i + 1, len(middles) - 1)]
        most = max(seconds, 0.0) / tokens
        found.append(min(max((high - low) / (b - a), 0.0), most) if b > a else most / 2)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
