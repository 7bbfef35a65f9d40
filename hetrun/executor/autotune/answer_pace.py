"""How much longer a token of an answer takes than its pass.

Between two passes the engine samples, turns tokens into text and hands it out, and tries now and then what
might be faster; other programs take their share, too. People wait for all of that, so a promise of tokens per
second counts it, as the last answers of this model showed it.
"""

from __future__ import annotations

from collections.abc import Callable

from hetrun.graph import Graph
from hetrun.planner.costmodel import WorkTimes

PACE = "answers against passes"  # a fact of a model
WINDOW = 32  # tokens of an answer that are compared with what their passes should take
PAUSE_S = 0.1  # a longer gap is no work of the engine: a client paused
MOST = 4.0  # an answer that took longer than this was disturbed

Predict = Callable[[float], float | None]  # seconds of a pass of one token, by the depth of its text


def pace_of(forecast: WorkTimes, graph: Graph, threads: int) -> float:
    """The factor with this number of threads; 1 before the first answer."""
    return forecast.fact(PACE, _key(graph, threads)) or 1.0


def _key(graph: Graph, threads: int) -> str:
    """What all files have in common whose passes are alike."""
    nbytes = sum(weight.nbytes for weight in graph.weights().values())
    return f"{len(graph.ops)} operations with {nbytes} bytes and {threads} threads"


class Gaps:
    """What lies between the passes of one answer."""

    def __init__(self) -> None:
        self._ended = float("-inf")

    def begin(self, start: float) -> float | None:
        """Seconds since the last pass; None where it was of something else, or there was a pause."""
        gap = start - self._ended
        return gap if gap < PAUSE_S else None

    def end(self, end: float, answering: bool) -> None:
        """A pass ended; one of a prompt is followed by what answers do not have."""
        self._ended = end if answering else float("-inf")


class Pace:
    """Watches answers of one sequence; belongs to the engine's thread."""

    def __init__(self, forecast: WorkTimes, graph: Graph, predict: Predict) -> None:
        self._forecast, self._predict, self._graph = forecast, predict, graph
        self._tokens, self._took = 0, 0.0

    def observe(self, seconds: float, depth: float, threads: int) -> None:
        """A token that came `seconds` after the one before, in a text of this depth."""
        self._tokens += 1
        self._took += seconds
        if self._tokens < WINDOW:
            return
        if should := self._predict(depth - WINDOW / 2):
            key = _key(self._graph, threads)
            self._forecast.learn_fact(PACE, key, min(MOST, self._took / (WINDOW * should)))
        self._tokens, self._took = 0, 0.0

    def interrupt(self) -> None:
        """Something else ran: what was seen so far is no whole window."""
        self._tokens, self._took = 0, 0.0
