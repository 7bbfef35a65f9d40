"""The rules that look at nothing but the candidates: each gives fewer of them, or other logits.

At least one that is possible is always left. What llama.cpp computes in float32 is computed in float64 here.
"""

from __future__ import annotations

import math

import numpy as np

from hetrun.sampling.candidates import MOST, Candidates, Ints, Past
from hetrun.sampling.rng import Doubles
from hetrun.sampling.top_k import best, leading

LEAST = 2.0**-150  # what is less is 0 in float32, and greedy
XTC = 1  # its stream of random numbers; the draw's is 0


def top_k(c: Candidates, past: Past, *, k: int) -> Candidates:
    """The k best."""
    if k >= c.size:
        return c
    return c.pick(slice(k) if c.ranked else best(c.logits, k), k, ranked=True)


def top_p(c: Candidates, past: Past, *, p: float, min_keep: int) -> Candidates:
    """The fewest best whose probabilities add up to p."""
    weights = c.weights()
    if not c.ranked:
        return c.pick(leading(c.logits, weights, p * weights.sum(), min_keep, "left"), min_keep, ranked=True)
    ends = weights.cumsum()
    kept = int(ends.searchsorted(p * ends[-1])) + 1
    return c.pick(slice(max(kept, min_keep)), min_keep)


def min_p(c: Candidates, past: Past, *, p: float, min_keep: int) -> Candidates:
    """Those at least p times as probable as the best."""
    kept = _at_least(c, c.peak + math.log(p))
    if len(kept) < min_keep:
        kept = best(c.logits, min_keep)
    return c.pick(kept, min_keep)


def top_n_sigma(c: Candidates, past: Past, *, n: float) -> Candidates:
    """Those whose logits are within n standard deviations of the best."""
    possible = c.logits[c.logits > -np.inf]
    kept = _at_least(c, c.peak - n * float(possible.std(dtype=np.float64)))
    return c.pick(kept, c.size)


def typical_p(c: Candidates, past: Past, *, p: float, min_keep: int) -> Candidates:
    """The fewest whose probabilities add up to p, of those about as surprising as the average first."""
    surprises, weights = _surprises(c)
    total = weights.sum()
    distance = np.abs(surprises - _mean(surprises, weights))
    kept = leading(-distance, weights, p * total, min_keep, "right")
    return c.pick(np.sort(kept), min_keep)


def xtc(c: Candidates, past: Past, *, probability: float, threshold: float, min_keep: int) -> Candidates:
    """By chance, without those that are probable, but for the least probable of them."""
    if past.chance(XTC) >= probability:
        return c
    weights = c.weights()
    probable = ((weights >= threshold * weights.sum()) & (weights > 0)).nonzero()[0]
    last = len(probable) - 1
    if last < 1 or c.size - last < min_keep:
        return c
    if c.ranked:
        return c.pick(slice(last, None), c.size - last)
    kept = np.ones(len(weights), np.bool_)
    kept[best(c.logits, last)] = False
    return c.pick(kept.nonzero()[0], c.size - last)


def temperature(c: Candidates, past: Past, *, value: float) -> Candidates:
    """A low temperature sharpens, a high one flattens, and 0 leaves nothing but the best."""
    if value > 0:
        return Candidates(c.ids, np.divide(c.logits, value, dtype=np.float64), c.ranked, c.impossible)
    at = 0 if c.ranked else int(c.logits.argmax())  # the lowest id of equals
    return c.pick(np.array([at], np.intp), c.size, ranked=True)


def dynamic_temperature(
    c: Candidates, past: Past, *, least: float, most: float, exponent: float
) -> Candidates:
    """A temperature that grows with the candidates' entropy."""
    if c.size < 2:
        return c
    share = _mean(*_surprises(c)) / math.log(c.size)
    value = least + (most - least) * share**exponent
    return temperature(c, past, value=value if value > LEAST else 0.0)


def _at_least(c: Candidates, bar: float) -> Ints:
    """Where the logits reach a bar."""
    if c.logits.dtype == np.float32:  # compared in float32, so the bar is rounded up to one
        rounded = np.float32(max(bar, -MOST))
        bar = float(rounded if float(rounded) >= bar else np.nextafter(rounded, np.float32(np.inf)))
    return (c.logits >= bar).nonzero()[0]


def _surprises(c: Candidates) -> tuple[Doubles, Doubles]:
    """Each one's negative log-probability, and its weight."""
    deficits = np.subtract(c.peak, c.logits, dtype=np.float64)
    weights = np.exp(-deficits)
    return deficits + math.log(weights.sum()), weights


def _mean(surprises: Doubles, weights: Doubles) -> float:
    """The candidates' entropy."""
    possible = weights > 0
    return float(np.dot(surprises[possible], weights[possible]) / weights.sum())
