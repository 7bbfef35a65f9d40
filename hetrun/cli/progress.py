"""A progress bar on stderr, for what takes longer than a second, and only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from hetrun.system.progress import MeasuringProgress

PATIENCE = 1.0  # seconds before a bar is worth drawing
OPENING, MEASURING = "loading", "measuring this model, once"


@contextmanager
def loading(what: str) -> Iterator[Callable[[float], None] | None]:
    """A function to be told the part that is done; None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = _TerminalBar(what)
    try:
        yield bar.update
    finally:
        bar.close()


@dataclass(frozen=True, slots=True)
class ProgressRow:
    """How far something has come that is counted."""

    done: int
    total: int | None  # None: unknown
    remarks: str = ""
    left_s: float | None = None


@contextmanager
def rows(what: str) -> Iterator[Callable[[ProgressRow], None] | None]:
    """A function to be told how far something has come; None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    words = ("{task.fields[count]}", "{task.fields[remarks]}", "{task.fields[left]}")
    texts = [TextColumn(text, markup=False) for text in ("{task.description}", *words)]
    columns = (texts[0], BarColumn(bar_width=24), *texts[1:])
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None, count="", remarks="", left="")

        def show(row: ProgressRow) -> None:
            count = f"{row.done} of {row.total} done" if row.total is not None else f"{row.done} done"
            count += "," if row.remarks else ""
            left = "" if row.left_s is None else f"{clock(row.left_s)} left"
            progress.update(
                task, completed=row.done, total=row.total, count=count, remarks=row.remarks, left=left
            )

        yield show


def clock(seconds: float) -> str:
    """As 1:05, or 2:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _TerminalBar:
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

        def draw(part: float) -> None:
            what = MEASURING if isinstance(part, MeasuringProgress) and part < 1 else self._what
            progress.update(task, completed=part, description=what)

        self._draw = draw

    def close(self) -> None:
        if self._close:
            self._close()
