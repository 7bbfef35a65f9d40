"""The pane at the right: the machine, live."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from hetrun.tui.machine import Facts, draw


class MachinePane(VerticalScroll, can_focus=True):
    """Layers, rates, context, memory, disk, and why the plan changed."""

    def compose(self) -> ComposeResult:
        yield Static("", markup=False)

    def show(self, facts: Facts) -> None:
        """As it is now."""
        if self.display:
            self.query_one(Static).update(draw(facts, max(self.scrollable_content_region.width - 1, 10)))
