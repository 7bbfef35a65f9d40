"""Random numbers, and the candidate that one of them falls on."""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.floating[Any]]
Doubles: TypeAlias = npt.NDArray[np.float64]

BLOCK = 8192  # in float64 it stays in the second-level cache: ten times faster at 128k tokens than one piece
UNIFORMS = 64


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """The random number for the token at `position`, in [0, 1).

    It depends on nothing else, so a sampler has no generator state to save: taking tokens back or forking a
    sequence is a change of one integer, and a text is the same whether or not its tokens were speculated.
    """
    return _uniforms(seed, position // UNIFORMS, stream)[position % UNIFORMS]


@lru_cache(maxsize=256)  # building a generator takes 10 microseconds, more than a whole draw
def _uniforms(seed: int, block: int, stream: int) -> list[float]:
    # Philox is counter-based: key and counter name a block (it counts in the lowest word). Its raw bits are
    # taken because numpy promises that they stay the same, which it does not for a Generator's floats.
    bits = np.random.Philox(key=seed, counter=stream << 192 | block << 64).random_raw(UNIFORMS)
    return [float(number) for number in (bits >> np.uint64(11)) * 2.0**-53]


def weights(logits: Floats, peak: float) -> Doubles:
    """Probabilities in units of the best token's."""
    out = np.subtract(logits, peak, dtype=np.float64)
    return np.exp(out, out=out)


def masses(logits: Floats, peak: float) -> Doubles:
    """The weights of each block together."""
    starts = range(0, len(logits), BLOCK)
    return np.array([weights(logits[i : i + BLOCK], peak).sum() for i in starts])


def draw(logits: Floats, peak: float, u: float) -> int:
    """On which u, in [0, 1), falls when they lie side by side, as wide as they are probable."""
    if len(logits) == 1:
        return 0
    ends = masses(logits, peak).cumsum()
    point = u * ends[-1]
    block = falls_on(ends, point)
    start = block * BLOCK
    inner = weights(logits[start : start + BLOCK], peak).cumsum()
    return start + falls_on(inner, point - (ends[block - 1] if block else 0.0))


def falls_on(ends: Sequence[float] | Doubles, point: float) -> int:
    """On which of some segments a point falls, when they lie side by side and end there."""
    found = bisect(ends, point)
    # Rounding may put the point on the very end: then it is the last one that has a width.
    return found if found < len(ends) else bisect_left(ends, ends[-1])
