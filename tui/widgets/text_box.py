"""A text of several lines that is written."""

from __future__ import annotations

from textual.widgets import TextArea


class TextBox(TextArea):
    """Textual's, whose undo looks for the cursor in a text that may have fewer lines by then."""

    def undo(self) -> None:
        self._go_to_what_stays()
        super().undo()

    def redo(self) -> None:
        self._go_to_what_stays()
        super().redo()

    def _go_to_what_stays(self) -> None:
        """The first line is there in every text; what is taken back puts the cursor where it was."""
        self.move_cursor((0, 0))
