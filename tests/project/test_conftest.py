"""What tests/conftest.py promises to every test: a home of its own, a clean environment, a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import move_in
from tests.support.paths import ROOT

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
    ours = {name: value for name, value in os.environ.items() if name.startswith("HETRUN_")}
    assert ours == {"HETRUN_PLANNER": "static", "HETRUN_THREADS": "1"}
    assert os.environ["HF_HUB_OFFLINE"] == "1"


# What a module's fixture, begun before the home of any test, and the module itself see.
AT_IMPORT = dict(os.environ)


@pytest.fixture(scope="module")
def before_any_test() -> dict[str, str]:
    return dict(os.environ)


def test_modules_and_their_fixtures_have_the_home_of_the_suite(
    before_any_test: dict[str, str], home: Path
) -> None:
    for seen in (AT_IMPORT, before_any_test):
        suite = Path(seen["HOME"])
        assert suite.is_dir()
        assert suite.parent.name.startswith("hetrun-tests-")
        assert home != suite
        for kind in ("CONFIG", "CACHE", "DATA", "STATE"):
            assert Path(seen[f"XDG_{kind}_HOME"]) == suite / kind.lower()
        assert seen["XDG_RUNTIME_DIR"] == str(suite)
        ours = {name: value for name, value in seen.items() if name.startswith("HETRUN_")}
        assert ours == {"HETRUN_PLANNER": "static", "HETRUN_THREADS": "1"}


@pytest.mark.usefixtures("all_threads")
def test_tests_about_threads_are_not_told_how_many() -> None:
    assert "HETRUN_THREADS" not in os.environ


def test_moving_in_leaves_everything_of_the_developer_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETRUN_CTX", "77")
    monkeypatch.setenv("XDG_CACHE_HOME", "/of/the/developer")
    move_in(tmp_path / "new", monkeypatch.setenv, monkeypatch.delenv)
    assert "HETRUN_CTX" not in os.environ
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path / "new" / "cache")
    assert list((tmp_path / "new").iterdir()) == []


DEVELOPER = """
import os
from pathlib import Path
import pytest

HOMES = [Path.home()]

@pytest.fixture(scope="session", autouse=True)
def of_the_session():
    HOMES.append(Path.home())

@pytest.fixture(scope="module", autouse=True)
def of_the_module():
    HOMES.append(Path.home())

def test_homes():
    for home in (*HOMES, Path.home()):
        assert home != Path(os.environ["DEVELOPER"])
        assert not (home / "config").exists()
    assert "HETRUN_CTX" not in os.environ
"""


@pytest.mark.slow
def test_the_developer_s_home_is_seen_by_nothing(tmp_path: Path) -> None:
    developer = tmp_path / "developer"
    (developer / "config").mkdir(parents=True)
    mine = {"HOME": str(developer), "DEVELOPER": str(developer), "HETRUN_CTX": "77"}
    mine |= {
        f"XDG_{kind}_HOME": str(developer / kind.lower()) for kind in ("CONFIG", "CACHE", "DATA", "STATE")
    }
    done = suite(tmp_path / "suite", DEVELOPER, (ROOT / "tests" / "conftest.py").read_text(), **mine)
    assert "1 passed" in done, done
    assert [path.name for path in developer.rglob("*")] == ["config"]


@pytest.mark.slow
def test_a_stuck_test_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    done = suite(tmp_path / "suite", STUCK, conftest.replace("LIMIT_S = 60", "LIMIT_S = 1"))
    assert "2 failed, 2 passed" in done
    assert done.count("Failed: still running after 1 s") >= 2


def suite(folder: Path, tests: str, conftest: str, **variables: str) -> str:
    """What pytest says of a suite with one file."""
    folder.mkdir()
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: as in hetrun\n")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio")
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}  # it imports a fixture
    env.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False).stdout
