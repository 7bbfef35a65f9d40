"""How much longer tokens of an answer take than their passes."""

from __future__ import annotations

import pytest

from hetrun.executor.autotune.answer_pace import MOST, PAUSE_S, WINDOW, Gaps, Pace, pace_of
from hetrun.planner.costmodel import WorkTimes
from tests.models.cases import GQA
from tests.support.rig import graph_of

GRAPH = graph_of(GQA)


def pace(forecast: WorkTimes, seconds: float | None = 0.01) -> Pace:
    return Pace(forecast, GRAPH, lambda depth: seconds)


def test_a_window_of_tokens_is_compared_with_their_passes() -> None:
    forecast = WorkTimes()
    watched = pace(forecast)
    for n in range(WINDOW - 1):
        watched.observe(0.015, n, 2)
    assert pace_of(forecast, GRAPH, 2) == 1.0
    watched.observe(0.015, WINDOW, 2)
    assert pace_of(forecast, GRAPH, 2) == pytest.approx(1.5)
    assert pace_of(forecast, GRAPH, 1) == 1.0


def test_what_runs_between_breaks_a_window() -> None:
    forecast = WorkTimes()
    watched = pace(forecast)
    for n in range(2 * WINDOW - 2):
        if n == WINDOW - 1:
            watched.interrupt()
        watched.observe(0.015, n, 2)
    assert pace_of(forecast, GRAPH, 2) == 1.0


def test_an_answer_that_was_disturbed_counts_no_more_than_four_times() -> None:
    forecast = WorkTimes()
    watched = pace(forecast)
    for n in range(WINDOW):
        watched.observe(1.0, n, 2)
    assert pace_of(forecast, GRAPH, 2) == MOST


def test_passes_of_which_nothing_is_known_teach_nothing() -> None:
    forecast = WorkTimes()
    watched = pace(forecast, None)
    for n in range(WINDOW):
        watched.observe(0.1, n, 2)
    assert pace_of(forecast, GRAPH, 2) == 1.0


def test_gaps_are_those_within_an_answer() -> None:
    gaps = Gaps()
    assert gaps.begin(5.0) is None
    gaps.end(6.0, answering=True)
    assert gaps.begin(6.01) == pytest.approx(0.01)
    assert gaps.begin(6.0 + 2 * PAUSE_S) is None
    gaps.end(7.0, answering=False)
    assert gaps.begin(7.01) is None
