"""Where the user writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from hetrun.tui.messages import Sent
from hetrun.tui.widgets.command_list import CommandList
from hetrun.tui.widgets.text_box import TextBox

NEW_LINE = ("ctrl+j", "shift+enter", "alt+enter")


class Prompt(TextBox):
    """Grows with its text; Enter sends, Ctrl+J begins a line (most terminals cannot send Shift+Enter)."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(",".join(NEW_LINE), "new_line", "New line", key_display="^j"),  # for the footer, see `on_key`
        # The text is short and the conversation long: these keys belong to the latter.
        Binding("pageup", "screen.page(-1)", show=False),
        Binding("pagedown", "screen.page(1)", show=False),
    ]

    class Leaving(Message):
        """The user goes to the turns."""

    class Erasing(Message):
        """Backspace where nothing is written: what goes with the message is taken away."""

    @dataclass
    class Pasted(Message):
        """The terminal pastes a text, or the path of what is dropped on it."""

        prompt: Prompt
        text: str

    @dataclass
    class Pasting(Message):
        """The user wants what is on the clipboard."""

        prompt: Prompt

    class Escaped(Message):
        """The user wants something to stop; in order with what is sent."""

    def __init__(self, commands: CommandList) -> None:
        super().__init__(placeholder="Write a message, or / for commands", tab_behavior="focus")
        self.highlight_cursor_line = False
        self._commands = commands
        self._said: list[str] = []  # earlier messages, the newest last
        self._at = 0  # of these; their number is the text that is being written
        self._draft = ""

    def remember(self, said: Sequence[str]) -> None:
        """Earlier messages, which the arrow keys bring back."""
        self._said = list(said)
        self._at = len(self._said)

    def on_key(self, event: events.Key) -> None:
        """Enter sends instead of beginning a line; arrows at the first and last line leaf through history.

        Bindings overtake the letters before them, which wait in this widget's queue.
        """
        row, last = self.cursor_location[0], self.document.line_count - 1
        if self._chooses(event.key):
            pass
        elif event.key == "enter":
            self.action_send()
        elif event.key in NEW_LINE:
            self.action_new_line()
        elif event.key == "up" and row == 0 and self._at > 0:
            self._leaf(-1)
        elif event.key == "down" and row == last and self._at < len(self._said):
            self._leaf(1)
        elif event.key == "tab":
            if not self.text.startswith("/"):
                self.post_message(self.Leaving())
        elif event.key == "escape":
            self.post_message(self.Escaped())
        elif event.key == "backspace" and not self.text:
            self.post_message(self.Erasing())
        elif event.key == "ctrl+v":
            self.post_message(self.Pasting(self))
        else:
            return
        event.stop()
        event.prevent_default()

    async def _on_paste(self, event: events.Paste) -> None:
        """Textual's inserts it, whatever it is."""
        event.stop()
        event.prevent_default()
        self.post_message(self.Pasted(self, event.text))

    def insert_pasted(self, text: str) -> None:
        """What was pasted is a text."""
        self.replace(text, *self.selection)

    def paste_text(self) -> None:
        """What was copied in the chat."""
        self.action_paste()

    def _leaf(self, step: int) -> None:
        if self._at == len(self._said):
            self._draft = self.text
        self._at += step
        self.put_back(self._draft if self._at == len(self._said) else self._said[self._at])

    # --- commands

    def _chooses(self, key: str) -> bool:
        """Whether the key is one for the list of commands, which is shown."""
        if not self._commands.follow(self.text):
            return False
        match key:
            case "up" | "down":
                self._commands.move(-1 if key == "up" else 1)
            case "escape":
                self._commands.close(self.text)
            case "tab" | "enter":
                return self._takes_chosen(key)
            case _:
                return False
        return True

    def _takes_chosen(self, key: str) -> bool:
        """Tab writes what is chosen, Enter sends it, too, if nothing has to follow; a whole command is sent
        as it stands."""
        chosen = self._commands.chosen
        if key == "enter" and (chosen is None or chosen.text.strip() == self.text.strip()):
            if chosen is None and self.text == "/":
                self._commands.move(1)
                return True
            return False
        if chosen is None:
            self._commands.move(1)
            return True
        self.put(chosen.text)
        if key == "enter" and chosen.is_whole:
            self.action_send()
        return True

    def take(self, index: int) -> None:
        """What was chosen with the mouse."""
        chosen = self._commands.offer(index)
        self.put(chosen.text)
        if chosen.is_whole:
            self.action_send()

    def put_back(self, text: str) -> None:
        """A text that was here before; a command in it was chosen already."""
        self.put(text)
        self._commands.close(text)

    def put(self, text: str) -> None:
        """This text and nothing else, with the cursor at its end."""
        self.load_text(text)
        self.move_cursor(self.document.end)

    def action_send(self) -> None:
        text = self.text.strip()
        if text:
            self.post_message(Sent(text))

    def sent(self, text: str) -> None:
        """It was taken: the next text begins."""
        self.clear()
        if text not in self._said[-1:]:
            self._said.append(text)
        self._at = len(self._said)

    def action_new_line(self) -> None:
        self.insert("\n")
