"""Engines that are closed behind a test, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hetrun.engine.engine import Engine
from tests.engine.asking import SCRIPTS, Open
from tests.engine.fakemodel import FakeModel, loaded


@pytest.fixture
def open_engine() -> Iterator[Open]:
    """Opens engines and closes them behind the test."""
    engines: list[Engine] = []

    def open_engine(model: FakeModel | None = None, **options: Any) -> Engine:  # noqa: ANN401
        engines.append(Engine(lambda: loaded(model or FakeModel(SCRIPTS), **options)))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Presses Ctrl-C, from another thread: the main thread gets one KeyboardInterrupt.

    A lock that is about to wait when the signal comes does not notice it, so it is pressed until it works.
    """
    raised = threading.Event()

    def handler(number: int, frame: object) -> None:
        if not raised.is_set():
            raised.set()
            raise KeyboardInterrupt

    def press() -> None:
        while not raised.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            raised.wait(0.01)

    before = signal.signal(signal.SIGINT, handler)
    yield press
    signal.signal(signal.SIGINT, before)
