"""What passes took whose weights come from disk, kept for the next plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.prefetch.pass_times import Passes, PassTimes, basis_of, learn
from hetrun.prefetch.streamed_weights import Compute, PassDelays


def test_a_pass_takes_the_longer_of_reading_and_computing(tmp_path: Path) -> None:
    times = PassTimes(least_s=0.1, each_s=0.01, off=1.5)
    assert times.seconds(1, 4e8, 1e9) == pytest.approx(0.6)
    assert times.seconds(1, 0.0, 1e9) == pytest.approx(0.15)
    assert times.seconds(50, 4e8, 1e9) == pytest.approx(0.9)
    assert replace(times, rate=2e9).seconds(1, 4e8, 1e9) == pytest.approx(0.3)


def test_each_tenth_of_the_weights_has_times_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "passes.json"
    assert Passes("a model", path).at(0.5) is None
    learn("a model", 0.52, PassTimes(0.1, 0.01, 1.2, found=0.7), path)
    assert Passes("a model", path).at(0.48) == PassTimes(0.1, 0.01, 1.2, found=0.7, exact=True)
    assert Passes("a model", path).at(0.9) == PassTimes(0.1, 0.01, 1.2, found=0.7, exact=False)
    assert Passes("another one", path).at(0.5) is None
    learn("a model", 0.81, PassTimes(0.3, 0.01, 1.0), path)
    nearest = Passes("a model", path).at(0.9)
    assert nearest is not None
    assert nearest.least_s == 0.3
    assert basis_of(nearest) == basis_of(None) == "predicted"
    assert basis_of(Passes("a model", path).at(0.8)) == "measured"


def test_only_passes_of_answers_are_kept() -> None:
    compute, late = Compute(), PassDelays()
    compute.observe(32, 0.2)
    late.add(0.2, 0.1, 50_000_000, 32, answering=False)
    assert compute.times(late, rate=1e9) is None
    compute.observe(1, 0.02)
    late.add(0.06, 0.04, 50_000_000, 1, answering=True)
    times = compute.times(late, rate=1e9)
    assert times is not None
    assert times.least_s == pytest.approx(0.02)
    assert times.off == pytest.approx(0.06 / 0.05)  # reading took 50 ms, the pass 60


def test_what_comes_between_passes_of_an_answer_counts() -> None:
    compute, late = Compute(), PassDelays()
    compute.observe(1, 0.02)
    late.add(0.9, 0.1, 50_000_000, 32, answering=False)
    late.add(0.06, 0.04, 40_000_000, 1, answering=True, gap=0.01)
    late.add(0.08, 0.04, 60_000_000, 1, answering=True, gap=0.03)
    times = compute.times(late, rate=1e9)
    assert times is not None
    assert times.off == pytest.approx((0.07 + 0.11) / (2 * 0.05))
