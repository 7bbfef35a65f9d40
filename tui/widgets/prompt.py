"""Where the user writes."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.widgets import TextArea

from hetrun.tui.messages import Sent


class Prompt(TextArea):
    """Grows with its text; Enter sends, Ctrl+J begins a line (most terminals cannot send Shift+Enter)."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send"),  # for the footer; `on_key` takes the key
        Binding("ctrl+j,shift+enter,alt+enter", "new_line", "New line", key_display="^j"),
        # The text is short and the conversation long: these keys belong to the latter.
        Binding("pageup", "screen.page(-1)", show=False),
        Binding("pagedown", "screen.page(1)", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(placeholder="Write a message", tab_behavior="focus", highlight_cursor_line=False)

    def on_key(self, event: events.Key) -> None:
        """Enter sends instead of beginning a line.

        A binding with priority would overtake the letters before it, which wait in this widget's queue.
        """
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            self.action_send()

    def action_send(self) -> None:
        if self.text.strip():
            self.post_message(Sent(self.text.strip()))

    def action_new_line(self) -> None:
        self.insert("\n")
