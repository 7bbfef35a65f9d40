"""A progress bar on stderr, for what takes longer than a second and only where somebody looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

PATIENCE = 1.0  # seconds before a bar is worth drawing
OPENING = "loading (and measuring, the first time)"  # one bar for both: only the model knows which it is


@contextmanager
def loading(what: str) -> Iterator[Callable[[float], None] | None]:
    """A function to be told the part that is done; None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(what)
    try:
        yield bar.update
    finally:
        bar.close()


class _Bar:
    def __init__(self, what: str) -> None:
        self._what = what
        self._start = perf_counter()
        self._close: Callable[[], None] | None = None
        self._draw: Callable[[float], None] = self._wait

    def update(self, part: float) -> None:
        self._draw(part)

    def _wait(self, part: float) -> None:
        if perf_counter() - self._start > PATIENCE:
            self._begin()
            self._draw(part)

    def _begin(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn())
        progress = Progress(*columns, console=Console(stderr=True), transient=True)
        task = progress.add_task(self._what, total=1.0)
        progress.start()
        self._close = progress.stop
        self._draw = lambda part: progress.update(task, completed=part)

    def close(self) -> None:
        if self._close:
            self._close()
