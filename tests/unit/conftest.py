"""Only numpy is there for the tests in this folder: what needs more belongs to the folder named after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.numpyonly import numpy_only


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    with numpy_only():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with numpy_only():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with numpy_only():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with numpy_only():
        return (yield)
