"""What the suite and every test get: a clean environment, a home of their own, and a time limit."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

from hetrun.system import entry_points
from tests.plugins.strangers import register as register  # a fixture

# A test whose package has no wheel for this Python is skipped with that reason.
from tests.support.absent import (
    pytest_pycollect_makemodule as pytest_pycollect_makemodule,
    pytest_runtest_makereport as pytest_runtest_makereport,
)
from tests.support.limits import within as within  # a fixture

LIMIT_S = 60
SLOW_LIMIT_S = 900

# The same examples in every run, and no failure because the machine was busy for a moment.
settings.register_profile(
    "hetrun", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("hetrun")

# A developer who works on a plugin has it installed here, and it must not change what is tested.
entry_points._all = partial(lambda all_of_them: (p for p in all_of_them() if p.is_ours), entry_points._all)


def move_in(path: Path, setenv: Callable[[str, str], object], delenv: Callable[[str], object]) -> None:
    """Make `path` the home: no configuration, cache or model of the developer is read or written."""
    path.mkdir()
    setenv("HOME", str(path))
    for kind in ("CONFIG", "CACHE", "DATA", "STATE"):
        setenv(f"XDG_{kind}_HOME", str(path / kind.lower()))
    setenv("XDG_RUNTIME_DIR", str(path))
    # Workers of pytest-xdist say that every terminal has 80 columns.
    for name in [n for n in os.environ if n.startswith("HETRUN_") or n in ("COLUMNS", "LINES")]:
        delenv(name)
    setenv("HF_HUB_OFFLINE", "1")
    # Caches are empty here, so each test would measure its model again: seconds, for what few are about.
    setenv("HETRUN_PLANNER", "static")
    # Several workers share the cores: threads that wait for each other at barriers would take most of
    # the time.
    setenv("HETRUN_THREADS", "1")


# A shell has what it runs in the background ignore Ctrl-C, and children inherit that: also those that tests
# stop with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The suite's own home is there before anything is collected: some modules look for a cache when they are
# imported, and fixtures of modules and of the session begin before the home of a test.
_suite = Path(tempfile.mkdtemp(prefix="hetrun-tests-"))
atexit.register(shutil.rmtree, _suite, ignore_errors=True)
move_in(_suite / "home", os.environ.__setitem__, os.environ.__delitem__)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What must have the machine to itself is for `make test-all`."""
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker("exhaustive")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that runs too long; native calls do not hear this, faulthandler_timeout ends those."""
    limit = SLOW_LIMIT_S if item.get_closest_marker("slow") else LIMIT_S

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        pytest.fail(f"still running after {limit} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Places for homes, in a folder of their own: pytest looks through its folder for each new one in it."""
    base = tmp_path_factory.mktemp("homes")
    return (base / str(i) for i in count())


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """What a command with -v sets is not for the tests after it."""
    log = logging.getLogger("hetrun")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture(autouse=True)
def home(homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home for this test alone."""
    path = next(homes)
    move_in(path, monkeypatch.setenv, monkeypatch.delenv)
    return path


@pytest.fixture
def all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests about threads: how many there are is not said for them."""
    monkeypatch.delenv("HETRUN_THREADS")
