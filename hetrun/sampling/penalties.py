"""Tokens that came before become less probable."""

from __future__ import annotations

import numpy as np

from hetrun.sampling.candidates import Candidates, Past


def penalties(
    c: Candidates, past: Past, *, last_n: int, repeat: float, frequency: float, presence: float
) -> Candidates:
    """Of the last tokens, each once by `repeat` and by `presence`, and by `frequency` as often as it came."""
    tokens, counts = np.unique(past.last(last_n), return_counts=True)
    if not len(tokens):
        return c
    places, which = c.find(tokens.astype(np.intp))
    logits = c.logits[places].astype(np.float64)
    # The paper only divides, which would make a token with a negative logit more probable.
    logits = np.where(logits <= 0, logits * repeat, logits / repeat)
    return c.edit(places, logits - (counts[which] * frequency + presence))
