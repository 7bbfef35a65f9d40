"""The best of many, found without sorting them all."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import numpy as np

from hetrun.errors import BackendError
from hetrun.sampling.candidates import Ints
from hetrun.sampling.native import greatest
from hetrun.sampling.rng import Doubles, Floats

GROUPS = 1024  # vocabularies are mostly multiples of it, or nearly

Side: TypeAlias = Literal["left", "right"]


def check_peak(peak: float | np.floating[Any]) -> None:
    """The greatest logit must be a number; NaN counts as greater than all."""
    if math.isfinite(peak):
        return
    what = "NaN"
    if math.isinf(peak):
        what = "an infinite value" if peak > 0 else "only -inf, which leaves no token to choose"
    raise BackendError(f"the logits hold {what}: the step that computed them went wrong")


def leaders(values: Floats, k: int) -> tuple[list[int], list[float]]:
    """Where the k greatest are and what they are, as `best` has them."""
    if (lib := greatest()) and (found := lib.find(values, min(k, len(values)))) and found[0]:
        check_peak(found[1][0])
        return found
    places = _best(values, k)
    return places.tolist(), values[places].tolist()


def best(values: Floats, k: int) -> Ints:
    """Where the k greatest are, in descending order, equals by ascending index; none at -inf."""
    return np.array(leaders(values, k)[0], np.intp)


def _best(values: Floats, k: int) -> Ints:
    """The same where there is no library, or more is asked for than it has room for.

    Of more than k groups, k reach the k-th greatest of the groups' maxima, so the k-th greatest of all is no
    less. What is below need not be looked at; with many groups, hardly anything else is above.
    """
    k = min(k, len(values))
    ranked = np.partition(_maxima(values, k), (-k, -1))
    peak, least = ranked[-1], ranked[-k]
    if not math.isfinite(peak):  # NaN is sorted behind everything
        check_peak(peak)
    places = (values >= least if math.isfinite(least) else values > least).nonzero()[0]
    if len(places) > 4 * k:
        listed = values[places]
        places = places[listed >= np.partition(listed, -k)[-k]]
    # From behind, so that a stable sort, turned round, has the lower of two equals first.
    places = places[::-1]
    found: Ints = places[values[places].argsort(kind="stable")[: -k - 1 : -1]]
    return found


def _maxima(values: Floats, k: int) -> Floats:
    """The greatest of each group; of a short row, or for a large k, all.

    A group is every 1024th value: so numpy compares many groups at once, and not the values of one.
    """
    n, groups = len(values), GROUPS * math.ceil(1.5 * k / GROUPS)
    if n < 4 * groups:
        return values
    cut = n - n % groups
    maxima: Floats = values[:cut].reshape(-1, groups).max(0)
    np.maximum(maxima[: n - cut], values[cut:], out=maxima[: n - cut])
    return maxima


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
