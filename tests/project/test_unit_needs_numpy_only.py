"""tests/unit needs numpy and nothing else: whatever else it imports is not found there."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.numpyonly import numpy_only

ROOT = Path(__file__).resolve().parents[2]


def test_other_packages_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchgen", raising=False)  # what was imported stays
    assert find_spec("torchgen")
    with numpy_only():
        assert not find_spec("torchgen")
        for name in (
            "numpy.linalg",
            "hypothesis.extra",
            "json.tool",
            "hetrun.system.entry_points",
            "tests.support.rig",
        ):
            assert find_spec(name), name
    assert find_spec("torchgen")


def test_no_module_of_tests_unit_imports_more() -> None:
    """In a process of its own, in which no other test has imported anything."""
    command = [sys.executable, "-m", "pytest", "tests/unit", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.OK, done.stdout[-3000:] + done.stderr[-3000:]
