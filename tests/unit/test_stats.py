"""Records of what ran."""

from __future__ import annotations

import pytest

from hetrun.executor.stats import Stats, TimeKey

KEY, OTHER = TimeKey("model", "null", "1", 2), TimeKey("model", "null", "2-4", 2)


def test_a_record_counts_runs() -> None:
    stats = Stats()
    record = stats.record(KEY)
    record.add(1, 0.4)
    record.add(1, 0.2)
    stats.record(OTHER).add(3, 1.0)
    assert stats.record(KEY) is record
    assert (record.runs, record.tokens, record.best) == (2, 2, 0.2)
    assert record.seconds == pytest.approx(0.6)
    assert [(k, r.runs) for k, r in stats] == [(KEY, 2), (OTHER, 1)]


def test_newer_runs_count_more() -> None:
    record = Stats().record(KEY)
    record.add(1, 1.0)
    assert record.smoothed == 1.0
    for _ in range(50):
        record.add(1, 2.0)
    assert 1.9 < record.smoothed < 2.0


def test_what_never_ran_is_not_shown() -> None:
    stats = Stats()
    stats.record(KEY)
    assert list(stats) == []


def test_the_share_of_python() -> None:
    stats = Stats()
    assert stats.python_share == 0
    stats.step(seconds=1.0, native=0.75)
    stats.step(seconds=3.0, native=2.25)
    assert stats.python_share == 0.25
    assert (stats.steps, stats.step_seconds, stats.native_seconds) == (2, 4.0, 3.0)


def test_a_reset_reaches_records_that_others_hold() -> None:
    stats = Stats()
    record = stats.record(KEY)
    record.add(4, 1.0)
    stats.step(1.0, 1.0)
    stats.reset()
    assert list(stats) == []
    assert (stats.steps, stats.python_share) == (0, 0)
    record.add(2, 0.5)
    assert [(k, r.runs, r.tokens, r.seconds, r.best) for k, r in stats] == [(KEY, 1, 2, 0.5, 0.5)]
