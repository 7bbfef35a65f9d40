"""Tests that need a package which this Python cannot have are skipped with that reason, and no others.

Which packages those are `hetrun doctor` says too. A package that is only not installed is a failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from hetrun.tools.missing_packages import not_to_be_had

REASONS = {package.module: package.to_text() for package in not_to_be_had()}


def reason(error: BaseException | None) -> str | None:
    """Why a test cannot run, if it ended with this because of such a package."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return REASONS.get(error.name.partition(".")[0])
    return None


class Module(pytest.Module):
    """A module of tests that may import such a package."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            if why := reason(error.__cause__):
                pytest.skip(why, allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    made: pytest.Module = Module.from_parent(parent, path=module_path)
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """For what a test or its fixtures import while they run."""
    if call.excinfo is not None and (why := reason(call.excinfo.value)):
        call.excinfo = pytest.CallInfo[None].from_call(lambda: pytest.skip(why), call.when).excinfo
