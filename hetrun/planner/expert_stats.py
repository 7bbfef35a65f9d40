"""Which experts tokens choose: counted in some of the small passes, forgotten slowly, and kept in a file for
the next start."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import Floats, Pass
from hetrun.config import dirs
from hetrun.graph import Graph
from hetrun.graph.ops import Moe
from hetrun.loader.fingerprint import fingerprint
from hetrun.system.files import read_text, replace_file

EVERY = 4  # passes, of which one is counted
MOST_TOKENS = 16  # of a pass; in larger ones nearly all experts are chosen by some token
MEMORY = 1000.0  # tokens that were counted, until what they chose is worth a third
ENOUGH = 100.0  # of them, before anything follows from it
DOUBT = 8.0  # tokens that would choose all experts alike, beside those that were counted
FORMAT = 1
MOST_BYTES = 8 << 20  # of a file
MOST_COUNTED = 1e9

log = logging.getLogger(__name__)


class Choices:
    """Counts for each router of a graph. Only the engine's thread uses it."""

    def __init__(self, graph: Graph) -> None:
        mixtures = {op.weights[0].name: op.attrs for op in graph.ops if isinstance(op.attrs, Moe)}
        self._used = {router: a.n_used for router, a in mixtures.items()}
        self._counts = {router: np.zeros(a.n_experts) for router, a in mixtures.items()}
        self._passes = 0

    def ask(self, work: Pass) -> None:
        """Before a pass: have it say what its tokens choose, now and then."""
        if self._counts and len(work.tokens) <= MOST_TOKENS:
            self._passes += 1
            if self._passes % EVERY == 0:
                work.chosen = self.add

    def add(self, router: str, chosen: NDArray[np.integer[Any]]) -> None:
        """Some rows have chosen these experts, a row of numbers each."""
        counts = self._counts[router]
        counts *= np.exp(-len(chosen) / MEMORY)
        counts += np.bincount(chosen.reshape(-1), minlength=len(counts))

    def likely(self, router: str) -> Floats | None:
        """For each expert how likely a token chooses it; None while that is not known."""
        counts, used = self._counts.get(router), self._used.get(router, 1)
        if counts is None or (tokens := float(counts.sum()) / used) < ENOUGH:
            return None
        found: Floats = ((counts + DOUBT * used / len(counts)) / (tokens + DOUBT)).astype(np.float32)
        return np.minimum(found, 1.0)

    # --- between two starts

    def load(self, path: Path) -> None:
        """What was counted before, if it is of these mixtures. A file that is damaged counts as none."""
        try:
            if not self._counts or not path.exists():
                return
            data = json.loads(read_text(path, MOST_BYTES))
            if data["format"] != FORMAT:
                raise ValueError(f"it is not of format {FORMAT}")
            found = {router: np.array(data["counts"][router], np.float64) for router in self._counts}
            for router, counts in found.items():
                good = counts.shape == self._counts[router].shape and np.isfinite(counts).all()
                if not good or counts.min() < 0 or counts.max() > MOST_COUNTED:
                    raise ValueError(f"what it says of {router} cannot be")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as e:
            log.warning("%s is ignored, and the choices of experts are counted from zero: %s", path, e)
            return
        self._counts = found

    def save(self, path: Path) -> None:
        """Keep what is known; OSError where that cannot be."""
        if not any(self.likely(router) is not None for router in self._counts):
            return
        counts = {router: [round(float(n), 2) for n in found] for router, found in self._counts.items()}
        text = json.dumps({"format": FORMAT, "counts": counts}, separators=(",", ":"))
        replace_file(path, text.encode())


def path_of(graph: Graph) -> Path | None:
    """Where a model's choices are kept, by what its routers are; None if it has none."""
    mixtures = (op for op in graph.ops if isinstance(op.attrs, Moe))
    routers = tuple(replace(op, weights=op.weights[:1]) for op in mixtures)
    if not routers:
        return None
    digest = fingerprint(replace(graph, ops=routers)).hex()[:24]
    return dirs().cache / "choices" / f"{digest}.json"


def known_choices(graph: Graph) -> Choices:
    """A model's, as far as they were kept."""
    found = Choices(graph)
    if path := path_of(graph):
        found.load(path)
    return found
