"""What the autotuner does for seconds stands aside, so that others can run in the middle of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from hetrun.executor.executor import Executor
from hetrun.executor.steps import Between


class YieldPoint:
    """Called now and then by what takes long; between two of its calls no other step runs."""

    def __init__(self, executor: Executor) -> None:
        self.away = 0.0  # seconds in which others ran
        self._executor = executor
        self._between: Between | None = None

    @contextmanager
    def for_the_sake_of(self, between: Between | None) -> Iterator[None]:
        """Until this ends, it is `between` that lets others run."""
        self._between = between
        try:
            yield
        finally:
            self._between = None

    def __call__(self, part: float = 0.0) -> None:
        """Let others run; `part` says how far the long work has come, and is not used."""
        if self._between:
            start = perf_counter()
            self._executor.forget_threads()
            self._between()
            self.away += perf_counter() - start
