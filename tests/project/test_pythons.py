"""tests.tools.pythons: which Pythons it takes, what it runs with each, and what it says in the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hetrun.tools import missing_packages
from tests.tools import pythons
from tests.tools.pythons import Python, Result, Step


def test_the_first_of_each_version_is_taken_and_ours_left_out() -> None:
    found = [
        None,
        Python((3, 12, 1), "/first"),
        Python((3, 12, 9), "/second"),
        Python((3, 10, 2), "/old"),
        Python((3, 15, 0), "/new"),
        Python((3, 14, 0), "/last"),
        Python((3, 11, 7), "/ours"),
    ]
    first, last, ours = found[1], found[5], found[6]
    assert pythons.chosen(found, (3, 11), None) == [first, last]
    assert pythons.chosen(found, (3, 11), "3.12") == [first]
    assert pythons.chosen(found, (3, 11), "3.11") == [ours]  # asked for by name
    assert pythons.chosen(found, (3, 11), "3.13") == []


def test_path_comes_first_and_of_pyenvs_the_newest(tmp_path: Path) -> None:
    for version in ("3.9.18", "3.12.9", "3.12.10"):
        (tmp_path / ".pyenv/versions" / version / "bin").mkdir(parents=True)
    found = [str(path) for path in pythons.candidates(f"/some:{os.pathsep}/other", tmp_path)]
    assert found.index("/some/python3.12") < found.index("/other/python3.11")
    of_pyenv = [path for path in found if path.endswith("bin/python3.12") and ".pyenv" in path]
    assert [Path(path).parts[-3] for path in of_pyenv] == ["3.12.10", "3.12.9", "3.9.18"]
    assert found[-1] == "/usr/bin/python3"


def test_each_says_its_version_and_what_made_its_environment() -> None:
    own = pythons.asked(Path(sys.executable))
    assert own is not None
    assert own.version == sys.version_info[:3]
    assert own.path == getattr(sys, "_base_executable", sys.executable)


@pytest.mark.parametrize("code", ["exit 1", "echo no version", "echo '[3, 12]'", "echo '[3, 12, []]'"])
def test_what_is_no_python_is_passed_by(tmp_path: Path, code: str) -> None:
    program = tmp_path / "python3.12"
    assert pythons.asked(program) is None
    program.write_text(f"#!/bin/sh\n{code}\n")
    assert pythons.asked(program) is None  # it may not be executed
    program.chmod(0o755)
    assert pythons.asked(program) is None


def test_what_is_run_stops_with_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        name: [sys.executable, "-c", f"raise SystemExit({code})"]
        for name, code in (("a", 0), ("b", 3), ("c", 0))
    }
    monkeypatch.setattr(pythons, "commands", lambda python, environment: given)
    result = pythons.tried(Python((3, 12, 1), "/python"))
    assert [(step.name, step.ok) for step in result.steps] == [("a", True), ("b", False)]
    assert not result.ok
    assert "Python 3.12, b: " in capsys.readouterr().out


def test_the_commands_are_those_of_the_makefile() -> None:
    found = pythons.commands(Python((3, 12, 1), "/python"), Path(".venv-3.12"))
    assert found == {
        "answer": ["make", "PYTHON=/python", "VENV=.venv-3.12", "run"],
        "install": ["make", "PYTHON=/python", "VENV=.venv-3.12", ".venv-3.12/test.stamp"],
        "tests": [".venv-3.12/bin/python", "-m", "tests.run"],
    }


def test_the_make_that_started_this_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEFLAGS", " -- VENV=.venv")
    monkeypatch.setenv("CXX", "g++-12")
    assert "MAKEFLAGS" not in pythons.environ()
    assert pythons.environ()["CXX"] == "g++-12"


def test_tests_are_counted_in_what_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    code = "print('3 passed in 1s'); print('tests: 7 passed, 1 failed, 2 skipped'); raise SystemExit(1)"
    step = pythons.step("tests", [sys.executable, "-c", code])
    assert (step.ok, dict(step.tests)) == (False, {"passed": 7, "failed": 1, "skipped": 2})
    assert "tests: 7 passed" in capfd.readouterr().out


def test_the_table_says_all(tmp_path: Path) -> None:
    (tmp_path / missing_packages.NOTES).write_text('{"python": [3, 14], "without": ["numba", "ray"]}')
    good = Step("answer", True, 61.2), Step("tests", True, 700.0, {"passed": 9, "skipped": 2})
    results = [
        Result(Python((3, 12, 1), "/a"), good),
        Result(Python((3, 14, 0), "/b"), (Step("answer", False, 3.0),), pythons.without(tmp_path)),
    ]
    assert pythons.table(results).splitlines() == [
        "Python 3.12.1 (/a): ok",
        "  answer   ok in 61 s",
        "  tests    ok in 700 s: 9 passed, 2 skipped",
        "Python 3.14.0 (/b): FAILED",
        "  answer   FAILED in 3 s",
        "  left out numba, ray: no wheel for this Python",
    ]
    assert pythons.without(tmp_path / "nowhere") == ()


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)])
def test_one_failure_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ok: bool, status: int
) -> None:
    other = Python((3, 12 if sys.version_info[1] != 12 else 13, 0), "/other")
    monkeypatch.setattr(pythons, "candidates", lambda path, home: [Path("/other"), Path("/none")])
    monkeypatch.setattr(pythons, "asked", lambda path: other if path == Path("/other") else None)
    monkeypatch.setattr(pythons, "tried", lambda python: Result(python, (Step("answer", ok, 1.0),)))
    assert pythons.main([]) == status
    said = capsys.readouterr().out
    assert f"Python {other.name}.0 (/other): {'ok' if ok else 'FAILED'}" in said
    assert "not on this machine: Python " in said


def test_where_there_is_no_other_python_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pythons, "candidates", lambda path, home: [])
    assert pythons.main([]) == 0
    assert "there is no other Python here" in capsys.readouterr().out
    assert pythons.main(["--only", "3.14"]) == 1
    assert "there is no Python 3.14 here" in capsys.readouterr().out
