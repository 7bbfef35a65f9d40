"""Kills and power cuts at some points of every operation: what was acknowledged is there, and nothing is
trusted that is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.crashes.models import FOLDER, make, make_mixture
from tests.crashes.operations import OPERATIONS
from tests.crashes.recorder import build
from tests.crashes.trial import Trial, environment
from tests.support.tiers import exhaustive

pytestmark = pytest.mark.slow

FEW, MANY = 3, 60  # points of each kind


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """recorder.c, built."""
    found, reason = build(tmp_path_factory.mktemp("library"))
    if found is None:
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Iterator[Mapping[str, str]]:
    with environment(make(tmp_path_factory.mktemp("models"))) as found:
        yield found


@pytest.fixture(scope="module")
def with_mixture(env: Mapping[str, str]) -> Mapping[str, str]:
    make_mixture(Path(env[FOLDER]))
    return env


def faults(operation: str, points: int, room: Path, env: Mapping[str, str], library: Path) -> list[str]:
    """What is wrong after kills and power cuts."""
    trial = Trial(operation, room, env, library, seed=1)
    try:
        rows = [trial.cut_power(points), trial.kill(points)]
    finally:
        trial.close()
    assert all(row.points == points and row.states for row in rows)
    return [fault for row in rows for fault in row.faults]


# Those that need no model: the others load one again and again, and are in the program and the slow tier.
@pytest.mark.parametrize("operation", ["pull", "batch", "conversations", "export"])
def test_some_points(operation: str, tmp_path: Path, env: Mapping[str, str], library: Path) -> None:
    assert faults(operation, FEW, tmp_path, env, library) == []


@exhaustive
@pytest.mark.parametrize("operation", OPERATIONS)
def test_many_points(operation: str, tmp_path: Path, with_mixture: Mapping[str, str], library: Path) -> None:
    assert faults(operation, MANY, tmp_path, with_mixture, library) == []
