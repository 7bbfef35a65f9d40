"""The best of many, found without sorting them all."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import numpy as np

from hetrun.errors import BackendError
from hetrun.sampling.candidates import Ints
from hetrun.sampling.draw import Doubles, Floats

FEW = 1024  # so many are sorted at once
SAMPLE = 1024

Side: TypeAlias = Literal["left", "right"]


def check_peak(peak: np.floating[Any] | float) -> None:
    """The greatest logit must be a number; NaN anywhere in the row makes it NaN."""
    if math.isfinite(peak):
        return
    what = "NaN"
    if math.isinf(peak):
        what = "an infinite value" if peak > 0 else "only -inf, which leaves no token to choose"
    raise BackendError(f"the logits hold {what}: the step that computed them went wrong")


def best(values: Floats, k: int) -> Ints:
    """Where the k greatest are, in descending order, equals by ascending index; none at -inf.

    A sample guesses a value that little more than k exceed. Whatever the guess, the answer is exact: too few,
    and all are looked at.
    """
    if len(values) <= FEW:
        return _ranked(values, (values > -np.inf).nonzero()[0], k)
    guess = _guess(values, k)
    found = (values >= guess if guess > -np.inf else values > -np.inf).nonzero()[0]
    if len(found) < k:
        found = (values > -np.inf).nonzero()[0]
    if len(found) > max(FEW, 4 * k):
        listed = values[found]
        found = found[listed >= np.partition(listed, -k)[-k]]
    return _ranked(values, found, k)


def _guess(values: Floats, k: int) -> float:
    """A value that more than k exceed, very likely."""
    sample = values[:: len(values) // SAMPLE].copy()
    among = k * len(sample) / len(values)  # so many of the k best are in the sample, on average
    rank = int(among + 4 * math.sqrt(among) + 3)
    if rank > len(sample):
        return -math.inf
    sample.partition(len(sample) - rank)
    return float(sample[len(sample) - rank])


def _ranked(values: Floats, places: Ints, k: int) -> Ints:
    return places[np.negative(values[places]).argsort(kind="stable")[:k]]


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
