"""Rows of a step that are looked at together: behind a step each call of numpy takes long to begin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetrun.graph.top_logits import Rows, TopLogits
from hetrun.sampling.interface import SampledToken, Sampler


def choose(samplers: Sequence[Sampler], rows: Rows) -> Sequence[SampledToken | None]:
    """What each sampler takes of its row, where that is found for all at once. None: ask the sampler itself,
    which may also say why nothing can be taken."""
    if isinstance(rows, TopLogits) or not samplers or not all([s.greedy for s in samplers]):
        return [None] * len(samplers)
    places = rows.argmax(1)  # the lowest id of equals, as each one would take; of a NaN its place
    fine = np.isfinite(rows[np.arange(len(rows)), places])
    return [
        SampledToken(place) if ok else None for place, ok in zip(places.tolist(), fine.tolist(), strict=True)
    ]
