"""Log-probabilities: the model's own, before any rule, or those with which a token was drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import TypeAlias

import numpy as np

from hetrun.sampling.candidates import Candidates
from hetrun.sampling.rng import Floats, masses
from hetrun.sampling.top_k import best, check_peak

Scores: TypeAlias = tuple[float, tuple[tuple[int, float], ...]]


def of_token(logits: Floats, token: int, n: int) -> Scores:
    """A token's, and those of the n best."""
    peak = float(logits.max())
    check_peak(peak)
    norm = peak + math.log(masses(logits, peak).sum())
    top = best(logits, n).tolist() if n else ()
    return float(logits[token]) - norm, tuple((i, float(logits[i]) - norm) for i in top)


def of_sampled(left: Candidates, row: Floats, token: int, n: int) -> Scores:
    """A token's among those that the rules have left to draw from, and those of the n best. Where fewer are
    left, the next best of the row follow, which cannot be drawn."""
    weights = left.weights()
    ids = np.arange(len(weights)) if left.ids is None else left.ids
    order = np.argsort(-weights, kind="stable")[:n]
    norm = math.log(weights.sum())
    found = {int(ids[i]): _log(weights[i]) - norm for i in order}
    if len(found) < n:
        others = (i for i in best(row, min(n + len(ids), len(row))).tolist() if i not in ids)
        found |= dict.fromkeys(islice(others, n - len(found)), -math.inf)
    own = np.flatnonzero(ids == token)
    return _log(weights[own[0]]) - norm if len(own) else -math.inf, tuple(found.items())


def _log(weight: float) -> float:
    return math.log(weight) if weight > 0 else -math.inf


def of_prompt(rows: Floats, tokens: Sequence[int], n: int) -> list[Scores]:
    """Those of the tokens that really followed, and of the n best of each row; one row at a time."""
    return [of_token(row, token, n) for row, token in zip(rows, tokens, strict=True)]
