"""A line above the box: what became of a command, or why it could not be done."""

from __future__ import annotations

from textual.timer import Timer
from textual.widgets import Static

from hetrun.system.terminal_text import visible

STAYS_S = 8.0  # what was done; what went wrong stays until the next message is begun


class Notice(Static):
    """One text at a time: the next takes its place."""

    def __init__(self) -> None:
        super().__init__("", markup=False)
        self.text = ""
        self._about = ""  # what stood in the box
        self._timer: Timer | None = None
        self.display = False

    def say(self, text: str, about: str, error: bool = False) -> None:
        """Show a text until something else stands in the box."""
        self.hide()
        self.text, self._about = text, about
        self.update(visible(text))
        self.set_class(error, "-error")
        self.display = bool(text)
        if not error:
            self._timer = self.set_timer(STAYS_S, self.hide)

    def written(self, text: str) -> None:
        """This stands in the box now."""
        if text != self._about:
            self.hide()

    def hide(self) -> None:
        """It was read."""
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        self.text = ""
        self.display = False
