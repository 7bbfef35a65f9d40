"""What is known before a model is read about passes for which weights come from disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hetrun.graph import Extent, Graph
from hetrun.loader.source import ModelSource
from hetrun.planner.plan import Placement, PlanSet
from hetrun.prefetch.disk_probe import UNKNOWN_RATE, USUAL, Disk, disk_of
from hetrun.prefetch.pass_times import Passes

BYTES_S = 25e9  # of weights that a pass of one token computes with in a second, about
AS_MANY = "each pass reads the {}, so it takes as many tokens as fit and are worthwhile"


def disk_of_weights(graph: Graph, measures: bool) -> Disk:
    """What the model's disk gives; a plan by a fixed order measures nothing."""
    if not measures:
        return Disk(USUAL, UNKNOWN_RATE, "nothing was measured")
    parts = (part for weight in graph.weights().values() for part in weight.parts)
    return disk_of(list(dict.fromkeys(part.path for part in parts if isinstance(part, Extent))))


def passes_of(source: ModelSource, backend: str, plans: PlanSet, homes: Sequence[Placement]) -> Passes:
    """Times of this model's passes in earlier runs, by a name for all that take equally long."""
    file = f"{Path(source.path).name[-80:]} of {source.nbytes} bytes"
    there = Counter(home.backend for home in homes)
    beside = "".join(f", {n} units on {device}" for device, n in sorted(there.items()))
    return Passes(f"{file} on {backend} with {plans.plan(1).threads} threads{beside}")
