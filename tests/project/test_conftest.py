"""What tests/conftest.py promises to every test: a home of its own, a clean environment, a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.import_rules import ROOT

STUCK = """
import time
import pytest

def test_stuck():
    time.sleep(30)

def test_swallows():
    try:
        time.sleep(30)
    except Exception:
        pass

@pytest.mark.slow
def test_slow_may_take_longer():
    time.sleep(1.5)

def test_next():
    pass
"""


def test_every_test_has_a_home_of_its_own(home: Path) -> None:
    assert Path.home() == home
    assert list(home.iterdir()) == []
    for kind in ("CONFIG", "CACHE", "DATA", "STATE"):
        assert Path(os.environ[f"XDG_{kind}_HOME"]).is_relative_to(home)
    assert [name for name in os.environ if name.startswith("HETRUN_")] == ["HETRUN_PLANNER"]
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.slow
def test_a_stuck_test_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest.replace("LIMIT_S = 60", "LIMIT_S = 1"))
    (tmp_path / "test_it.py").write_text(STUCK)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: as in hetrun\n")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}  # it imports a fixture
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "2 failed, 2 passed" in done.stdout
    assert done.stdout.count("Failed: still running after 1 s") >= 2
