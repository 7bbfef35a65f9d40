"""The bar in notebooks: IPython's display, which is a stand-in here."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hetrun.api import notebook


class Handle:
    """What IPython gives for something that is shown."""

    def __init__(self, shown: list[str]) -> None:
        self._shown = shown

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        assert raw
        self._shown.append(bundle["text/plain"])


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that a notebook shows, one in place of the other."""
    lines: list[str] = []

    def display(bundle: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert (raw, display_id, lines) == (True, True, [])
        lines.append(bundle["text/plain"])
        return Handle(lines)

    made: dict[str, Any] = {name: ModuleType(name) for name in ("ipykernel", "IPython", "IPython.display")}
    made["IPython"].get_ipython = lambda: SimpleNamespace(kernel="here")
    made["IPython.display"].display = display
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return lines


def test_a_bar_in_a_notebook(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(notebook, "perf_counter", lambda: now[0])
    update = notebook.notebook_progress("loading")
    assert update is not None
    update(0.1)
    assert shown == []  # what is quick needs no bar
    now[0] = 2.0
    for part in (0.25, 0.2501, 0.5, 1.0):
        update(part)
    assert shown == [
        "loading [######..................]  25%",
        "loading [############............]  50%",
        "loading [########################] 100%",
    ]


def test_no_bar_where_no_kernel_runs(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sys.modules["IPython"].get_ipython = lambda: SimpleNamespace()  # type: ignore[attr-defined]
    assert notebook.notebook_progress("loading") is None  # IPython's terminal
    monkeypatch.delitem(sys.modules, "ipykernel")
    assert notebook.notebook_progress("loading") is None
