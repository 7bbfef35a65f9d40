"""What planners find does not depend on how busy this machine is."""

from __future__ import annotations

import pytest

from hetrun.planner import residency
from hetrun.planner.two_device import balance


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver has time to find the best, and not only what it has after a second."""
    monkeypatch.setattr(residency, "LONGEST_S", 60.0)
    monkeypatch.setattr(balance, "SOLVE_SECONDS", 60.0)
