"""The best of many, found without sorting them all."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np

from hetrun.errors import BackendError
from hetrun.sampling.candidates import Ints
from hetrun.sampling.draw import Doubles, Floats

FEW = 1024  # so many are sorted at once
GROUPS = 64

Side: TypeAlias = Literal["left", "right"]


def check_peak(peak: float | np.floating[Any]) -> None:
    """The greatest logit must be a number; NaN counts as greater than all."""
    if math.isfinite(peak):
        return
    what = "NaN"
    if math.isinf(peak):
        what = "an infinite value" if peak > 0 else "only -inf, which leaves no token to choose"
    raise BackendError(f"the logits hold {what}: the step that computed them went wrong")


def best(values: Floats, k: int) -> Ints:
    """Where the k greatest are, in descending order, equals by ascending index; none at -inf.

    Cut the row into more than k groups: as k of them reach the k-th greatest of the groups' maxima, the k-th
    greatest of all is no less. What is below need not be looked at, and little else is above.
    """
    k = min(k, len(values))
    maxima = _maxima(values, k)
    if len(maxima) <= FEW:
        order = maxima.argsort(kind="stable")
        peak, least = maxima[order[-1]], maxima[order[-k]]
    else:
        ranked = np.partition(maxima, (-k, -1))
        peak, least = ranked[-1], ranked[-k]
    if not math.isfinite(peak):  # NaN is sorted behind everything
        check_peak(peak)
    places = (values >= least if math.isfinite(least) else values > least).nonzero()[0]
    if len(places) > FEW + 4 * k:
        listed = values[places]
        places = places[listed >= np.partition(listed, -k)[-k]]
    # From behind, so that a stable sort, turned round, has the lower of two equals first.
    places = places[::-1]
    found: Ints = places[values[places].argsort(kind="stable")[: -k - 1 : -1]]
    return found


def _maxima(values: Floats, k: int) -> Floats:
    """The greatest of each group, and those that are in none; of a short row, or for a large k, all."""
    n = len(values)
    cut, shape, starts = _groups(n, k)
    if n <= FEW or shape[1] < 4:
        return values
    # By argmax, because behind a decode step numpy's reductions take twice as long to begin.
    places = values[:cut].reshape(shape).argmax(1) + starts
    if cut < n:
        places = np.concatenate((places, np.arange(cut, n)))
    maxima: Floats = values[places]
    return maxima


@lru_cache(maxsize=64)
def _groups(n: int, k: int) -> tuple[int, tuple[int, int], Ints]:
    """How far the groups reach, how many of how many there are, and where each begins."""
    groups = GROUPS * math.ceil(1.5 * k / GROUPS)  # vocabularies are mostly multiples of 64
    width = n // groups
    return groups * width, (groups, width), np.arange(groups) * width


def leading(values: Floats, masses: Doubles, enough: float, least: int, side: Side) -> Ints:
    """The fewest of the greatest values, in descending order, whose masses add up to `enough`.

    Beyond it, for side "right"; and `least` of them anyway.
    """
    n = 256
    while True:
        found = best(values, n)
        ends = masses[found].cumsum()
        if len(found) < n or (ends[-1] > enough and n >= least):
            break
        n *= 4
    return found[: max(int(ends.searchsorted(enough, side)) + 1, least)]
