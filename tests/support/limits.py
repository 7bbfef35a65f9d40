"""Limits of time that a test keeps: looked at in `make test-all` only, where nothing runs beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest

Within = Callable[[float], AbstractContextManager[None]]


@contextmanager
def _measured(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"it took {took:.2f} s, and {seconds} were given"


@pytest.fixture(
    params=[
        pytest.param(False, id="any_time"),
        pytest.param(True, id="timed", marks=pytest.mark.alone),
    ]
)
def within(request: pytest.FixtureRequest) -> Within:
    """`with within(5):` is a limit for what stands in it.

    A test that asks for this is there twice: in `make test` without any look at the clock, so that a busy
    machine fails nothing, and once more by itself with it.
    """
    return _measured if request.param else lambda seconds: nullcontext()
