"""A text of several lines that is written."""

from __future__ import annotations

from textual.strip import Strip
from textual.widgets import TextArea


class TextBox(TextArea):
    """Textual's, with two of its faults mended.

    Its undo looks for the cursor in a text that may have fewer lines by then. And where the cursor does not
    blink, its cache takes lines with the cursor for those without.
    """

    _with_cursor = False  # what is in the cache

    def render_line(self, y: int) -> Strip:
        if self._with_cursor != self._draw_cursor:
            self._with_cursor = self._draw_cursor
            self._line_cache.clear()
        return super().render_line(y)

    def undo(self) -> None:
        self._go_to_what_stays()
        super().undo()

    def redo(self) -> None:
        self._go_to_what_stays()
        super().redo()

    def _go_to_what_stays(self) -> None:
        """The first line is there in every text; what is taken back puts the cursor where it was."""
        self.move_cursor((0, 0))
