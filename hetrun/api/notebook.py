"""A progress bar for notebooks, which have no terminal: one line that is updated with each step."""

from __future__ import annotations

import sys
from importlib import import_module
from time import perf_counter
from types import ModuleType
from typing import Any

from hetrun.system.progress import Progress

WIDTH = 24
PATIENCE_S = 1.0  # shorter work needs no bar


def notebook_progress(what: str) -> Progress | None:
    """A function to call with the finished share; None outside a notebook's kernel."""
    display = _display()
    return _NotebookBar(what, display).update if display else None


def _display() -> ModuleType | None:
    """IPython's `display` module in a kernel of Jupyter; None elsewhere, such as in IPython's terminal."""
    if "ipykernel" not in sys.modules or "IPython" not in sys.modules:
        return None
    shell = import_module("IPython").get_ipython()
    return import_module("IPython.display") if hasattr(shell, "kernel") else None


class _NotebookBar:
    def __init__(self, what: str, display: ModuleType) -> None:
        self._what, self._display = what, display
        self._start = perf_counter()
        self._handle: Any = None
        self._shown = ""

    def update(self, part: float) -> None:
        """Show the progress; called on the engine's thread."""
        if self._handle is None and (part >= 1 or perf_counter() - self._start < PATIENCE_S):
            return
        line = bar_line(self._what, part)
        if line == self._shown:
            return
        self._shown = line
        # Plain text, because the front end need not be a browser.
        bundle = {"text/plain": line}
        if self._handle is None:
            self._handle = self._display.display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def bar_line(what: str, part: float) -> str:
    """The progress as a line of text."""
    done = min(max(part, 0.0), 1.0)
    full = round(WIDTH * done)
    return f"{what} [{'#' * full}{'.' * (WIDTH - full)}] {100 * done:3.0f}%"
