"""Where the user writes."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widgets import TextArea

from hetrun.tui.messages import Sent


class Prompt(TextArea):
    """Grows with its text; Enter sends, Ctrl+J begins a line (most terminals cannot send Shift+Enter)."""

    BINDINGS: ClassVar[list[BindingType]] = [
        # With priority, because the text area would take the key for itself.
        Binding("enter", "send", "Send", priority=True),
        Binding("ctrl+j,shift+enter,alt+enter", "new_line", "New line", key_display="^j"),
        # The text is short and the conversation long: these keys belong to the latter.
        Binding("pageup", "screen.page(-1)", show=False),
        Binding("pagedown", "screen.page(1)", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(placeholder="Write a message", tab_behavior="focus", highlight_cursor_line=False)

    def action_send(self) -> None:
        if self.text.strip():
            self.post_message(Sent(self.text.strip()))

    def action_new_line(self) -> None:
        self.insert("\n")
