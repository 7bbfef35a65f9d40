"""The pane at the right: the machine, live."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from hetrun.tui.machine import Facts, draw


class MachinePane(VerticalScroll, can_focus=True):
    """Layers, rates, context, memory, disk, and why the plan changed."""

    _lines = -1
    _facts: Facts | None = None  # what is shown

    def compose(self) -> ComposeResult:
        yield Static("", markup=False)

    def on_resize(self) -> None:
        if self._facts is not None:  # it was drawn for another width, perhaps before it had any
            self.show(self._facts)

    def show(self, facts: Facts) -> None:
        """As it is now."""
        self._facts = facts
        if self.display:
            found = draw(facts, max(self.scrollable_content_region.width - 1, 10))
            lines, self._lines = self._lines, found.plain.count("\n")
            # The same number of lines needs no new layout of the screen, unless one of them wraps.
            self.query_one(Static).update(found, layout=lines != self._lines)
