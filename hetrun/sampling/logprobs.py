"""Log-probabilities: the model's own, before any rule, or those with which a token was drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def of_sampled(left: Candidates, token: int, n: int) -> Scores:
    """A token's among those that the rules have left to draw from, and those of the n best of these."""
    weights = left.weights()
    ids = np.arange(len(weights)) if left.ids is None else left.ids
    norm = math.log(weights.sum())
    best = [i for i in np.argsort(-weights, kind="stable")[:n] if weights[i] > 0]
    own = np.flatnonzero((ids == token) & (weights > 0))
    return (
        math.log(weights[own[0]]) - norm if len(own) else -math.inf,
        tuple((int(ids[i]), math.log(weights[i]) - norm) for i in best),
    )


def of_prompt(rows: Floats, tokens: Sequence[int], n: int) -> list[Scores]:
    """Those of the tokens that really followed, and of the n best of each row; one row at a time."""
    return [of_token(row, token, n) for row, token in zip(rows, tokens, strict=True)]
